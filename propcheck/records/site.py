"""One residual addition: the rows of ``sublayers.parquet``."""

from dataclasses import dataclass
from typing import Annotated, Literal

from propcheck.records.columns import about

Sublayer = Literal["attention", "linear_attention", "ssm", "mlp", "moe", "other"]


@dataclass(frozen=True, slots=True)
class SiteRecord:
    """One residual addition of one seed; the fields are the columns of ``sublayers.parquet``, in order."""

    seed: Annotated[int, about("Seed of the weights and inputs.")]
    site: Annotated[int, about("Index of the residual addition, from 0 in forward order.")]
    block: Annotated[int | None, about("Layer of the site; null outside the blocks.")]
    sublayer: Annotated[
        Sublayer, about("Kind of sublayer that made the update: attention, linear_attention, ssm, mlp, moe or other.")
    ]
    module: Annotated[str | None, about("Path of the module that made the update.")]
    placement: Annotated[
        str | None,
        about(
            "Where the norm sits: pre, post, sandwich, reordered, deepnorm or none; pre+post if there is also one on the "
            "stream; null if it could not be determined."
        ),
    ]
    continues: Annotated[int | None, about("Site whose sum is this site's stream; null where a stream begins.")] = None
    masked: Annotated[
        bool | None, about("Whether the update is multiplied by a random mask on the way to the addition (stochastic depth).")
    ] = None
    promoted: Annotated[
        str | None,
        about(
            "Operation that promoted the stream to a wider dtype since the previous sum without an explicit cast, with its "
            "other operand; null if there was none."
        ),
    ] = None
    stream_dtype: Annotated[str | None, about("Dtype of the stream operand of the addition.")] = None
    update_dtype: Annotated[str | None, about("Dtype of the update operand of the addition.")] = None
    stream_norm: Annotated[
        float | None,
        about(
            "Norm of the stream: root of the mean over tokens of the squared L2 norm.", unit="norm", phrase="norm of the stream"
        ),
    ] = None
    update_norm: Annotated[float | None, about("Norm of the update.", unit="norm", phrase="norm of the update")] = None
    sum_norm: Annotated[float | None, about("Norm of the sum.", unit="norm", phrase="norm of the sum")] = None
    stream_rms: Annotated[
        float | None,
        about(
            "RMS of the stream that the sublayer receives: sqrt(mean of squares) over all non-padding tokens and the width.",
            unit="RMS",
            label="stream RMS",
            phrase="RMS of the stream",
        ),
    ] = None
    update_rms: Annotated[
        float | None,
        about("RMS of the update, which is added to the stream.", unit="RMS", label="update RMS", phrase="RMS of the update"),
    ] = None
    sum_rms: Annotated[
        float | None, about("RMS of the sum, stream + update.", unit="RMS", label="sum RMS", phrase="RMS of the sum")
    ] = None
    stream_mean: Annotated[float | None, about("Mean of the stream.", unit="mean", phrase="mean of the stream")] = None
    update_mean: Annotated[float | None, about("Mean of the update.", unit="mean", phrase="mean of the update")] = None
    sum_mean: Annotated[float | None, about("Mean of the sum.", unit="mean", phrase="mean of the sum")] = None
    sum_absmax: Annotated[float | None, about("Largest absolute value in the sum.", phrase="largest magnitude in the sum")] = (
        None
    )
    update_ratio: Annotated[
        float | None,
        about("update_rms / stream_rms.", unit="ratio", label="update / stream", phrase="ratio of update to stream RMS"),
    ] = None
    cosine: Annotated[
        float | None,
        about(
            "Cosine between stream and update, each flattened over the non-padding tokens.",
            phrase="cosine between stream and update",
        ),
    ] = None
    add_error: Annotated[
        float | None,
        about(
            "Rounding error of the addition relative to the update: ||fl(x+F) - (x+F)|| / ||F||.",
            unit="ratio",
            phrase="rounding error of the addition",
        ),
    ] = None
    swallowed: Annotated[
        float | None,
        about(
            "Fraction of the elements with F != 0 where fl(x+F) == x: the addition changed nothing.",
            unit="fraction",
            label="rounded away",
            phrase="fraction of the update rounded away",
        ),
    ] = None
    nonfinite: Annotated[
        int | None,
        about(
            "Number of NaN and infinite elements in the sum.", unit="count", phrase="number of non-finite elements in the sum"
        ),
    ] = None
    token_correlation: Annotated[
        float | None, about("Mean cosine between the token vectors of the sum.", phrase="mean cosine between tokens")
    ] = None
    norm_input_rms: Annotated[
        float | None,
        about(
            "RMS of the input of the norm through which the sublayer reads the stream.",
            unit="RMS",
            label="norm input RMS",
            phrase="RMS of the norm's input",
        ),
    ] = None
    norm_output_rms: Annotated[
        float | None,
        about(
            "RMS of the output of that norm, with its gain.",
            unit="RMS",
            label="norm output RMS",
            phrase="RMS of the norm's output",
        ),
    ] = None
    epsilon_share: Annotated[
        float | None,
        about(
            "Fraction of the tokens whose mean square is below 10 eps at the norm through which the sublayer reads.",
            unit="fraction",
            phrase="fraction of tokens dominated by epsilon",
        ),
    ] = None
    bare_read: Annotated[
        bool | None, about("Whether the sublayer also reads the stream without that norm; null if there is no norm.")
    ] = None
    attention_logit_rms: Annotated[
        float | None,
        about(
            "RMS of the attention logits (scaled, before the softmax) over the unmasked pairs; null if they cannot be "
            "observed.",
            unit="RMS",
            label="attention logit RMS",
            phrase="RMS of the attention logits",
        ),
    ] = None
    attention_logit_absmax: Annotated[
        float | None, about("Largest magnitude of the attention logits.", phrase="largest attention logit")
    ] = None
    attention_entropy: Annotated[
        float | None,
        about(
            "Mean entropy of the attention weights relative to uniform attention over the keys visible to each query (queries "
            "with one visible key are excluded): 1 is uniform, 0 is a single key.",
            unit="ratio",
            phrase="relative entropy of the attention",
        ),
    ] = None
    grad_stream_norm: Annotated[
        float | None,
        about(
            "Gradient norm (Frobenius over the batch) of the stream operand, over all paths that read it; if the addition uses "
            "a cast or scaled copy of the stream, of that copy.",
            unit="norm",
            label="stream gradient",
            phrase="gradient norm of the stream",
        ),
    ] = None
    grad_update_norm: Annotated[
        float | None,
        about("Gradient norm of the update.", unit="norm", label="update gradient", phrase="gradient norm of the update"),
    ] = None
    grad_sum_norm: Annotated[
        float | None, about("Gradient norm of the sum.", unit="norm", label="sum gradient", phrase="gradient norm of the sum")
    ] = None
    param_grad_norm: Annotated[
        float | None,
        about(
            "Gradient norm of all parameters between the stream and the update, including those of the norm in front.",
            unit="norm",
            label="branch gradient",
            phrase="gradient norm of a branch's parameters",
        ),
    ] = None
    theory_sum_rms: Annotated[
        float | None, about("Predicted sum_rms; null if no prediction applies.", unit="RMS", phrase="predicted RMS of the sum")
    ] = None
    theory_grad_norm: Annotated[
        float | None,
        about(
            "Predicted grad_stream_norm; null if no prediction applies.",
            unit="norm",
            phrase="predicted gradient norm of the stream",
        ),
    ] = None
    shadow_stream_error: Annotated[
        float | None,
        about(
            "With --shadow: ||stream - fp32 stream|| / ||fp32 stream||.",
            unit="ratio",
            phrase="error of the stream against fp32",
        ),
    ] = None
    shadow_update_error: Annotated[
        float | None,
        about("With --shadow: the same ratio for the update.", unit="ratio", phrase="error of the update against fp32"),
    ] = None
    shadow_grad_stream_error: Annotated[
        float | None,
        about(
            "With --shadow: the same ratio for the gradient of the stream.",
            unit="ratio",
            phrase="error of the stream's gradient against fp32",
        ),
    ] = None
    shadow_grad_update_error: Annotated[
        float | None,
        about(
            "With --shadow: the same ratio for the gradient of the update.",
            unit="ratio",
            phrase="error of the update's gradient against fp32",
        ),
    ] = None
