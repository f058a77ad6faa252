"""What torch's functions, methods and modules do to channels, by name."""

from __future__ import annotations

from typing import Any

ELEMENTWISE = frozenset(  # a list of words, written as such
    "relu relu6 leakyrelu elu selu celu gelu silu mish hardswish hardtanh tanh abs square sqrt neg identity dropout "  # noqa: SIM905
    "dropout1d dropout2d dropout3d contiguous clone detach float half bfloat16 to".split()
)
"""What treats every number by itself and makes nothing of zeros: torch's functions, methods and modules by `word`.

A sigmoid is not among them: what was dropped would come back as one half.
"""

OVER_PIXELS = frozenset(
    "maxpool1d maxpool2d maxpool3d avgpool1d avgpool2d avgpool3d adaptiveavgpool1d adaptiveavgpool2d adaptiveavgpool3d "  # noqa: SIM905
    "adaptivemaxpool1d adaptivemaxpool2d adaptivemaxpool3d interpolate upsample upsamplingbilinear2d "
    "upsamplingnearest2d zeropad1d zeropad2d zeropad3d".split()
)
"""The same for every channel by itself, where pixels lie behind the channels."""

SUMS, PRODUCTS, QUOTIENTS = {"add", "iadd", "sub", "isub"}, {"mul", "imul"}, {"div", "truediv", "itruediv"}


def word(target: Any) -> str:
    """Return the name of a function, method or module of torch's, as one word for all of its spellings."""
    if isinstance(target, str):
        return target.replace("_", "").lower()
    module = getattr(target, "__module__", None) or "torch"
    library = module.removeprefix("torch._ops.") if module.startswith("torch._ops.") else ""
    home = library if library not in ("", "aten") else module.partition(".")[0]
    own = "" if home in ("torch", "_operator", "builtins") else f"{home}."  # another library's relu may be anything
    return own + str(getattr(target, "__name__", target)).replace("_", "").lower()
