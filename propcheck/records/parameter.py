"""One parameter or buffer: the rows of ``parameters.parquet``."""

from dataclasses import dataclass
from typing import Annotated, Literal

from propcheck.records.columns import about
from propcheck.records.site import Sublayer

GradState = Literal["norm", "zero", "none", "nonfinite"]


@dataclass(frozen=True, slots=True)
class ParameterRecord:
    """One parameter or buffer; the fields are the columns of ``parameters.parquet``, in order."""

    name: Annotated[str, about("Qualified name of the parameter or buffer.")]
    role: Annotated[str | None, about("How the forward pass uses it; null if unknown.")]
    block: Annotated[int | None, about("Layer of the parameter; null outside the blocks.")]
    sublayer: Annotated[Sublayer | None, about("Kind of sublayer that contains it; null outside the sublayers.")]
    kind: Annotated[Literal["parameter", "buffer"], about("parameter or buffer.")]
    shape: Annotated[tuple[int, ...], about("Shape.")]
    dtype: Annotated[str, about("Dtype.")]
    numel: Annotated[int, about("Number of elements.", unit="elements")]
    site: Annotated[int | None, about("First site whose branch contains it; null outside the branches.")] = None
    branches: Annotated[int | None, about("Number of sites whose branch contains it; null if there is none.", unit="count")] = (
        None
    )
    writes: Annotated[
        bool | None,
        about(
            "Whether it is the residual projection, the matrix that produces the update of a site; null outside the branches."
        ),
    ] = None
    fan_in: Annotated[
        int | None,
        about(
            "Fan-in as torch.nn.init computes it: shape[1] x taps. An embedding counts as the head that it may be tied to. "
            "Null for a stack of matrices, and for all else that is not the matrix of a linear layer or a convolution.",
            unit="count",
        ),
    ] = None
    fan_out: Annotated[
        int | None, about("Fan-out as torch.nn.init computes it: shape[0] x taps; null where fan_in is.", unit="count")
    ] = None
    init_calls: Annotated[str | None, about("Calls that produced its initial value, in order.")] = None
    mean: Annotated[float | None, about("Mean of the elements.", unit="mean", phrase="mean of the parameter")] = None
    std: Annotated[float | None, about("Standard deviation of the elements.", phrase="standard deviation of the parameter")] = (
        None
    )
    absmax: Annotated[float | None, about("Largest absolute value.", phrase="largest magnitude in the parameter")] = None
    zeros: Annotated[int | None, about("Number of elements that are exactly zero.", unit="count")] = None
    nonfinite: Annotated[int | None, about("Number of NaN and infinite elements.", unit="count")] = None
    duplicate_rows: Annotated[int | None, about("Number of rows that equal an earlier row.", unit="count")] = None
    fp64_error: Annotated[
        float | None,
        about(
            "For a half-precision buffer that was computed without random calls: largest difference from the same calls in "
            "fp64, beyond the rounding of its own dtype; null elsewhere.",
            phrase="error of the buffer against fp64",
        ),
    ] = None
    requires_grad: Annotated[bool, about("Whether it is trained.")] = True
    grad_state: Annotated[
        GradState | None,
        about("norm (finite, non-zero), zero, none (no path from the loss) or nonfinite; null if not observed."),
    ] = None
    grad_norm: Annotated[
        float | None,
        about(
            "Frobenius norm of the gradient.", unit="norm", label="parameter gradient", phrase="gradient norm of a parameter"
        ),
    ] = None
    grad_spread: Annotated[
        float | None,
        about(
            "Standard deviation (n - 1) over the seeds of ln(grad_norm); null for one seed, or if the norm of a seed is zero, "
            "none or non-finite.",
            unit="nats",
            phrase="spread of the gradient norm over seeds",
        ),
    ] = None
    used: Annotated[bool | None, about("Whether any operation of the forward pass used it; null if not observed.")] = None
