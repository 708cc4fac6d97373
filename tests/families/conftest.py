"""Compilation, not arithmetic, is what these tests wait for: the quick ones go without XLA's expensive passes."""

import jax
import pytest


@pytest.fixture(autouse=True)
def _quick_compilation(request):
    if request.node.get_closest_marker("slow"):  # these see the kernels that users run
        yield
        return
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
