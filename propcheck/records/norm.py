"""One normalisation: the rows of ``norms.parquet``."""

from dataclasses import dataclass
from typing import Annotated, Literal

from propcheck.records.columns import about

NormPlace = Literal["read", "inside", "written", "stream", "outside"]
NormKind = Literal["mean_square", "variance", "length"]


@dataclass(frozen=True, slots=True)
class NormRecord:
    """One normalisation of one seed; the fields are the columns of ``norms.parquet``, in order."""

    seed: Annotated[int, about("Seed of the weights and inputs.")]
    norm: Annotated[int, about("Index of the normalisation, from 0 in forward order.")]
    site: Annotated[
        int | None,
        about("Site whose branch contains the norm or, for a norm on the stream, whose sum it reads; null elsewhere."),
    ]
    block: Annotated[int | None, about("Layer of the norm; null outside the blocks.")]
    place: Annotated[
        NormPlace,
        about(
            "read: first operation of a branch on the stream; inside: within a branch (queries, keys, heads); written: last "
            "operation before the addition; stream: on the stream itself, between two additions; outside: elsewhere (after the "
            "embedding, before the head)."
        ),
    ]
    module: Annotated[str | None, about("Path of the module that ran the norm.")]
    parameter: Annotated[str | None, about("Name of the gain; null if it has none.")]
    kind: Annotated[
        NormKind,
        about(
            "Statistic that divides the input: root of the mean_square, root of the variance, or length (root of the sum of "
            "squares)."
        ),
    ]
    dtype: Annotated[str, about("Dtype in which the statistic was computed.")]
    width: Annotated[int, about("Number of elements that are normalised together.", unit="elements")]
    eps: Annotated[float | None, about("Constant added to the statistic; null if none was observed.")] = None
    input_rms: Annotated[float | None, about("RMS of the input.", unit="RMS", phrase="RMS of the norm's input")] = None
    input_absmax: Annotated[
        float | None, about("Largest absolute value in the input.", phrase="largest magnitude in the norm's input")
    ] = None
    output_rms: Annotated[
        float | None, about("RMS of the output, with the gain.", unit="RMS", phrase="RMS of the norm's output")
    ] = None
    gain: Annotated[
        float | None,
        about(
            "RMS of the gain as it is applied: of 1 + weight for a zero-centred gain; null if there is none.",
            unit="RMS",
            phrase="RMS of the norm's gain",
        ),
    ] = None
    epsilon_share: Annotated[
        float | None,
        about(
            "Fraction of the vectors whose statistic is below 10 eps.",
            unit="fraction",
            phrase="fraction of vectors dominated by epsilon",
        ),
    ] = None
    zero_share: Annotated[
        float | None,
        about(
            "Fraction of the vectors that are non-zero but have a zero output.",
            unit="fraction",
            phrase="fraction of vectors normalised to zero",
        ),
    ] = None
