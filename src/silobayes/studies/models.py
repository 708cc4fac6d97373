"""From a study to the model that it describes."""

from silobayes.core.errors import InvalidInput
from silobayes.models import MODELS, build
from silobayes.models.base import AbstractModel
from silobayes.studies.study import ModelKind, Study


def build_model(study: Study, num_features: int) -> AbstractModel:
    """The catalogue's model for a study: what [data] says of the target decides between its variants."""
    kind, options, data = study.model.kind, dict(study.model.options), study.data
    name = kind.value
    if kind is ModelKind.NUMPYRO:
        raise InvalidInput("model", "the model itself", "nothing", "Pass fit(..., model=from_numpyro(...)).")
    if kind is ModelKind.MLP:
        name = "mlp_real" if data.classes is None else "mlp_binary" if len(data.classes) == 2 else "mlp_classes"
    elif kind is ModelKind.GAUSSIAN:
        name = "gaussian_mean" if "noise_stddev" in options else "gaussian_mean_covariance"
    elif kind is ModelKind.LINEAR_REGRESSION and "noise_stddev" not in options:
        name = "linear_regression_unknown_noise"
    elif kind is ModelKind.NEGATIVE_BINOMIAL_REGRESSION and "concentration" not in options:
        name = "negative_binomial_regression_unknown_concentration"
    known = MODELS[name][1]
    if "num_classes" in known and data.classes is not None:
        options.setdefault("num_classes", len(data.classes))
    if "max_count" in known and data.target_bounds is not None:
        options.setdefault("max_count", int(data.target_bounds[1]))
    return build(name, options, num_features)
