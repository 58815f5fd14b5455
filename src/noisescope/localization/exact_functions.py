"""Which torch functions give the same bits on every healthy device: copies, views, choices, single IEEE operations."""

from __future__ import annotations

from typing import Any

_SHAPES = """
view view_as reshape reshape_as permute transpose swapaxes movedim t T mT mH H flatten unflatten squeeze unsqueeze
expand expand_as broadcast_to broadcast_tensors contiguous clone detach chunk split tensor_split unbind narrow select
index_select gather scatter scatter_ take_along_dim take repeat repeat_interleave tile roll flip cat concat
concatenate stack hstack vstack pad unfold diagonal diag tril triu tril_ triu_ masked_fill masked_fill_ masked_select
where index_put index_put_ index_copy index_copy_ index_fill index_fill_ copy_ fill_ zero_ to type type_as float
double half bfloat16 long int bool cpu cuda numpy item tolist size dim numel ndimension stride storage_offset
is_contiguous data_ptr new_zeros new_ones new_full new_empty new_tensor zeros ones full empty zeros_like ones_like
full_like empty_like arange tensor as_tensor from_numpy eye meshgrid get_device is_floating_point is_complex
__getitem__ __setitem__ __len__ __contains__ requires_grad_ retain_grad set_ resize_ as_strided nonzero argwhere
one_hot embedding real imag view_as_complex view_as_real complex polar_ dropout identity isin _set_grad_enabled
set_grad_enabled
"""
_SINGLE = """
add add_ __add__ __radd__ __iadd__ sub sub_ __sub__ __rsub__ __isub__ rsub subtract mul mul_ __mul__ __rmul__ __imul__
multiply div div_ __div__ __truediv__ __rtruediv__ __itruediv__ true_divide floor_divide __floordiv__ remainder fmod
__mod__ neg __neg__ negative abs __abs__ absolute sign signbit square relu relu_ clamp clamp_ clamp_min clamp_min_
clamp_max clamp_max_ clip maximum minimum max min amax amin argmax argmin topk sort argsort round floor ceil trunc
sqrt eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__ equal logical_and logical_or logical_not logical_xor
bitwise_and bitwise_or bitwise_not __and__ __or__ __invert__ __xor__ any all isfinite isnan isinf nan_to_num bincount
histc unique searchsorted bucketize count_nonzero leaky_relu hardtanh relu6 threshold lerp_
"""
_EXACT = frozenset(_SHAPES.split()) | frozenset(_SINGLE.split())


def is_exact(function: Any) -> bool:
    """Whether its result depends on no order of summation and on no approximation. Unknown functions are not."""
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__"):  # attributes such as shape, dtype, grad
        return True
    return name in _EXACT
