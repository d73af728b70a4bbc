"""The kernel that accumulates updates and its twin in torch operations give the same residuals."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire import _native
from thinwire.codec.feedback import DTYPES, array_args
from thinwire.link.updates import accumulate_update


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 300),
    dtype=st.sampled_from(list(DTYPES)),
    decay=st.sampled_from([1.0, 0.75]),
    ahead=st.sampled_from([0.0, 1.0, 1.25]),
    bad=st.sampled_from([None, torch.inf, -torch.inf, torch.nan]),
    seed=st.integers(0, 2**31),
)
def test_kernel_and_torch_agree(
    n: int, dtype: torch.dtype, decay: float, ahead: float, bad: float | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shared, residual = torch.randn(n, generator=generator), 0.1 * torch.randn(n, generator=generator)
    local = (shared - residual + 0.01 * torch.randn(n, generator=generator)).to(dtype)
    if bad is not None and n:
        local[n // 2] = bad
    one, other = residual.clone(), residual.clone()
    finite = _native.accumulate_update(shared.data_ptr(), one.data_ptr(), array_args(local), ahead, decay)
    assert accumulate_update(shared, other, local, ahead, decay) == finite == (bad is None or n == 0)
    assert torch.equal(one, other) and bool(one.isfinite().all())
    if bad is not None and n:
        assert one[n // 2] == residual[n // 2]


def test_without_rounding_the_residual_is_the_distance_to_the_shared_parameters() -> None:
    shared = torch.arange(8.0)
    residual = torch.full((8,), 0.5)
    local = shared - 0.75  # the step began at shared - 0.5
    _native.accumulate_update(shared.data_ptr(), residual.data_ptr(), array_args(local), 1.0, 1.0)
    assert torch.equal(residual, torch.full((8,), 0.75))
