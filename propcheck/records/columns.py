"""One line a column of the three Parquet files; ``docs/columns.md`` is made from these."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

SUBLAYER_COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        "seed": "Seed of weights and inputs.",
        "site": "Residual addition, numbered from 0 in forward order.",
        "block": "Layer that the site belongs to; null outside the blocks.",
        "sublayer": "Kind of sublayer that made the update: attention, linear_attention, ssm, mlp, moe or other.",
        "module": "Path of the module that made the update.",
        "placement": "Where the norm sits: pre, post, sandwich, reordered, deepnorm or none; pre+post where one on "
        "the stream comes to it; null where it could not be told.",
        "continues": "The site whose sum this one's stream is; null where a stream begins.",
        "masked": "Whether a mask that was drawn at random (stochastic depth) lies on the way to the update.",
        "promoted": "What gave the stream a wider dtype since the sum before, though nothing cast it: the function and its "
        "other operand; null where nothing did.",
        "stream_dtype": "Dtype of the stream operand of the addition.",
        "update_dtype": "Dtype of the update operand of the addition.",
        "stream_norm": "Norm of the stream: root of the mean over tokens of the squared L2 norm.",
        "update_norm": "Norm of the update.",
        "sum_norm": "Norm of the sum.",
        "stream_rms": "RMS of the stream as the sublayer finds it: sqrt(mean of squares) over all real tokens and the width.",
        "update_rms": "RMS of the update, what is added to the stream.",
        "sum_rms": "RMS of the sum, stream + update.",
        "stream_mean": "Mean of the stream.",
        "update_mean": "Mean of the update.",
        "sum_mean": "Mean of the sum.",
        "sum_absmax": "Largest absolute value in the sum.",
        "update_ratio": "update_rms / stream_rms.",
        "cosine": "Cosine of stream and update, each flattened over the real tokens.",
        "add_error": "Rounding error of the addition relative to the update: ||fl(x+F) - (x+F)|| / ||F||.",
        "swallowed": "Fraction of the elements with F != 0 where fl(x+F) == x: the addition changed nothing.",
        "nonfinite": "NaN and infinite elements in the sum.",
        "token_correlation": "Mean cosine between the token vectors of the sum.",
        "norm_input_rms": "RMS of what enters the norm that the sublayer reads through.",
        "norm_output_rms": "RMS of what leaves that norm, its gain included.",
        "epsilon_share": "Fraction of tokens whose mean square is below 10 eps at the norm that the sublayer reads through.",
        "bare_read": "Whether the sublayer also reads the stream past that norm; null where it has none.",
        "attention_logit_rms": "RMS of the attention's logits (scaled, before the softmax) over the pairs that no mask hides; "
        "null where they cannot be seen.",
        "attention_logit_absmax": "Largest magnitude among them.",
        "attention_entropy": "Mean entropy of the attention's weights over that of uniform ones (over what each query may see, "
        "queries that see one key left out): 1 is uniform, 0 a single key.",
        "grad_stream_norm": "Norm (Frobenius over the batch) of the loss gradient with respect to the stream operand, with "
        "all that reads it; of a cast or scaled copy, the copy's.",
        "grad_update_norm": "Norm of the loss gradient with respect to the update.",
        "grad_sum_norm": "Norm of the loss gradient with respect to the sum.",
        "param_grad_norm": "Norm of the gradients of all parameters on the way from the stream to the update, "
        "the norm it reads through included.",
        "theory_sum_rms": "Predicted sum_rms; null where no prediction applies.",
        "theory_grad_norm": "Predicted grad_stream_norm; null where no prediction applies.",
        "shadow_stream_error": "With --shadow: ||stream - that of the fp32 pass|| / ||that of the fp32 pass||.",
        "shadow_update_error": "The same of the update.",
        "shadow_grad_stream_error": "The same of the gradient with respect to the stream.",
        "shadow_grad_update_error": "The same of the gradient with respect to the update.",
    }
)

PARAMETER_COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        "name": "Qualified name of the parameter or buffer.",
        "role": "What it is for, by its place in the model; null where unknown.",
        "block": "Layer that it belongs to; null outside the blocks.",
        "sublayer": "Kind of sublayer that it belongs to; null outside the sublayers.",
        "kind": "parameter or buffer.",
        "shape": "Shape.",
        "dtype": "Dtype.",
        "numel": "Number of elements.",
        "site": "The first site in whose branch it is; null outside the branches.",
        "branches": "How many sites have it in their branch; null where it is in none.",
        "writes": "Whether it is the matrix that wrote the update of a site, the residual projection; null where it is in no "
        "branch.",
        "fan_in": "Inputs of one of its units, as torch.nn.init counts them: shape[1] x taps. Null for what is no matrix of a "
        "linear layer, convolution or embedding (a lookup counts like the head that it may be tied to), and for stacks of "
        "matrices.",
        "fan_out": "Outputs of one of its inputs, counted and null likewise: shape[0] x taps.",
        "init_calls": "Calls that gave it its value, in order.",
        "mean": "Mean of its elements.",
        "std": "Standard deviation of its elements.",
        "absmax": "Largest absolute value.",
        "zeros": "Elements that are exactly zero.",
        "nonfinite": "NaN and infinite elements.",
        "duplicate_rows": "Rows that equal an earlier row.",
        "fp64_error": "Of a half-precision buffer that calls without chance made: the largest difference from what the same "
        "calls give in fp64, beyond the rounding of its own dtype; null elsewhere.",
        "requires_grad": "Whether it is trained.",
        "grad_state": "norm (finite, not zero), zero, none (no path from the loss) or nonfinite; null where not observed.",
        "grad_norm": "Frobenius norm of its gradient.",
        "grad_spread": "Standard deviation (n - 1) over the seeds of the natural logarithm of that norm; null for one seed, or "
        "where a seed's norm is zero, none or not finite.",
        "used": "Whether any operation of the forward pass used it; null where not observed.",
    }
)

NORM_COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        "seed": "Seed of weights and inputs.",
        "norm": "Normalisation, numbered from 0 in forward order.",
        "site": "The site in whose branch it is, or of a norm on the stream, whose sum it reads; null elsewhere.",
        "block": "Layer that it belongs to; null outside the blocks.",
        "place": "read: the first thing that a branch does to the stream; inside: within a branch (queries, keys, heads); "
        "written: the last thing before the addition; stream: on the stream itself, between two additions; outside: elsewhere "
        "(the embedding's, the final one).",
        "module": "Path of the module that ran it.",
        "parameter": "Name of its gain; null where it has none.",
        "kind": "What it divides by: the root of the mean_square, of the variance, or the length (root of the sum of squares).",
        "dtype": "Dtype in which the statistic was computed.",
        "width": "Elements that are normalised together.",
        "eps": "What is added to the statistic; null where none was seen.",
        "input_rms": "RMS of its input.",
        "input_absmax": "Largest absolute value in its input.",
        "output_rms": "RMS of its output, the gain included.",
        "gain": "RMS of the gain as it is applied: of 1 + weight where that is multiplied; null where it has none.",
        "epsilon_share": "Fraction of the vectors whose statistic is below 10 eps.",
        "zero_share": "Fraction of the vectors that are not zero and whose output is.",
    }
)


def markdown() -> str:
    """Render ``docs/columns.md``."""
    lines = [
        "# Columns",
        "",
        "Generated from `propcheck/records/columns.py` by `python docs/generate.py`; do not edit.",
        "",
        "A value that does not apply or was not observed is null, never 0; a computed NaN or infinity is stored as such.",
        "The norm of an activation is its rms times the root of the width, exactly.",
    ]
    for title, rows, columns in (
        ("sublayers.parquet", "one row a seed and site", SUBLAYER_COLUMNS),
        ("parameters.parquet", "one row a parameter or buffer", PARAMETER_COLUMNS),
        ("norms.parquet", "one row a seed and normalisation", NORM_COLUMNS),
    ):
        lines += ["", f"## {title}", "", f"{rows[0].upper()}{rows[1:]}.", "", "| column | meaning |", "|---|---|"]
        lines += [f"| `{name}` | {text.replace('|', chr(92) + '|')} |" for name, text in columns.items()]
    return "\n".join([*lines, "", "## JSON", "", _JSON]) + "\n"


_JSON = """\
`--output-format json` prints one strict JSON document: `schema_version`; `run` (path, target, model, precision, inputs,
seeds, engine, versions); `loss` (its value, `uniform`, the logarithm of the vocabulary, the range over the seeds, and how
far the logits are spread); `findings` (rule, name, severity, site, metric, value, expected, message, remedy, source, also);
`growth` (of each stream, named by its first site: by which law its RMS and its gradient go over the blocks, the factor a
block and what it compounds to); and `sublayers`, the rows of `sublayers.parquet`. A number that is not finite is the string
"NaN", "Infinity" or "-Infinity". `run.json` in the run directory holds the same without the rows, and beside it `settings`
(every key of the probe), `config_hash`, `command`, `notes`, `unobserved` (a sentence for each place that could not be
followed), `doublings` (additions that count the stream twice), `angles` (sines and cosines of angles in half precision) and
`origins` (the operation that made the first NaN or infinity)."""
