"""How well a posterior predicts rows that a study declares public."""

import numpy as np

from silobayes.data.silo import Silo
from silobayes.posteriors import Posterior


def evaluate(posterior: Posterior, test: Silo) -> dict[str, float]:
    """Average log-likelihood, and accuracy (with auc for two classes) or rmse.

    Generalised linear models are integrated over their linear predictor, others averaged over 1000 draws (papers: 100).
    """
    metrics = {"log_likelihood": float(np.mean(posterior.log_likelihood(test.x, test.y)))}
    assert posterior.model is not None
    if posterior.model.target in ("binary", "classes"):
        probabilities = posterior.predict_proba(test.x)
        metrics["accuracy"] = float(np.mean(probabilities.argmax(axis=1) == test.y))
        if probabilities.shape[1] == 2:
            metrics["auc"] = area_under_curve(probabilities[:, 1], test.y)
    elif posterior.model.target in ("real", "count"):
        metrics["rmse"] = float(np.sqrt(np.mean((posterior.predict(test.x) - test.y) ** 2)))
    return {key: value for key, value in metrics.items() if np.isfinite(value)}


def area_under_curve(scores: np.ndarray, labels: np.ndarray) -> float:
    """Probability that a row of class 1 scores above one of class 0, ties counted half; NaN without both."""
    order = np.sort(scores)
    ranks = (np.searchsorted(order, scores, side="left") + np.searchsorted(order, scores, side="right") + 1) / 2
    ones = labels == 1
    positives, negatives = int(ones.sum()), int((~ones).sum())
    if positives == 0 or negatives == 0:
        return float("nan")
    return float((ranks[ones].sum() - positives * (positives + 1) / 2) / (positives * negatives))
