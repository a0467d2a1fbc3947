"""Names of torch's functions, grouped by what they do to a signal; methods and functions of one name count as one."""

CONVOLUTIONS = {"conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
ATTENTIONS = {"scaled_dot_product_attention", "multi_head_attention_forward"}
RECURRENCES = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
# These mix positions with fixed weights.
TRANSFORMS = {
    "fft_fft", "fft_ifft", "fft_fft2", "fft_ifft2", "fft_fftn", "fft_ifftn", "fft_rfft", "fft_irfft", "fft_rfft2", "fft_irfft2",
    "fft_rfftn", "fft_irfftn",
}  # fmt: skip
# Along one dimension, the tokens.
SEQUENTIAL = {"conv1d", "conv_transpose1d", "avg_pool1d"} | TRANSFORMS
POOLS = {"avg_pool1d", "avg_pool2d", "avg_pool3d"}
PRODUCTS = CONVOLUTIONS | ATTENTIONS | RECURRENCES | TRANSFORMS | POOLS | {
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "addmm", "addmm_", "baddbmm", "addbmm", "addmv",
    "_grouped_mm", "grouped_mm", "_scaled_mm", "einsum", "tensordot", "bilinear", "chain_matmul",
    "linalg_multi_dot", "solve_triangular", "linalg_solve_triangular",
}  # fmt: skip
# Products whose one-dimensional parameters are factors, not biases.
UNBIASED = {"matmul", "__matmul__", "__rmatmul__", "mv", "einsum", "tensordot"}
SOFTMAXES = {"softmax", "log_softmax", "_softmax", "logsumexp"}
SCANS = {"cumsum", "cumprod", "logcumsumexp", "cummax"} | RECURRENCES
ROUTERS = {"topk", "one_hot", "argmax", "sort", "argsort", "multinomial"}
NORMS = {"layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "normalize", "native_layer_norm"}
# Reductions, with the position of their argument ``dim``.
REDUCTIONS = {
    "mean": 1, "sum": 1, "var": 1, "std": 1, "var_mean": 1, "std_mean": 1, "norm": 2, "vector_norm": 2, "linalg_norm": 2,
    "linalg_vector_norm": 2,
}  # fmt: skip
ROOTS = {"rsqrt", "rsqrt_", "sqrt", "sqrt_", "norm", "vector_norm", "linalg_norm", "linalg_vector_norm", "std", "std_mean"}
DIVISIONS = {"div", "div_", "divide", "divide_", "true_divide", "true_divide_"}
SCALINGS = DIVISIONS | {"mul", "mul_", "multiply", "multiply_"}
# The second operand is subtracted; the operands are put side by side.
DIFFERENCES = {"sub", "sub_", "subtract", "subtract_", "__sub__", "__isub__", "rsub", "__rsub__"}
COLLECTIONS = {
    "cat", "concat", "concatenate", "stack", "hstack", "vstack", "where", "__setitem__", "index_put", "index_put_",
    "index_add", "index_add_", "index_copy", "index_copy_", "scatter", "scatter_", "scatter_add", "scatter_add_",
    "masked_scatter", "masked_scatter_", "copy_", "lerp", "lerp_",
}  # fmt: skip
# The result is a view of the same memory, as of __get__ for x.T.
VIEWS = {
    "permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "view", "reshape", "flatten", "unflatten",
    "unsqueeze", "squeeze", "__get__", "__getitem__", "t", "chunk", "split", "narrow", "unbind", "select",
}  # fmt: skip
# Only the shape or dtype of the second operand matters.
AS = {"type_as", "view_as", "expand_as", "reshape_as", "to"}
CASTS = {"to", "type", "type_as", "float", "half", "bfloat16", "double"}
# The result has the elements of the operand in the same order.
COPIES = CASTS | {"clone", "contiguous", "detach", "view", "reshape"}
EXPONENTIALS = {"exp", "exp_", "exp2", "expm1"}
ADDITIONS = {"add", "add_", "__add__", "__radd__", "__iadd__"}
SUMS = ADDITIONS | {"index_add", "index_add_", "scatter_add", "scatter_add_"}
GATES = {"sigmoid", "sigmoid_", "hardsigmoid", "softmax", "tanh"}
# Random draws, from which a mask may be made.
DRAWS = {"bernoulli", "bernoulli_", "rand", "rand_like", "uniform_"}
# The result carries no signal.
SILENT = {
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_empty", "new_ones",
    "new_full",
}  # fmt: skip
# Whole layers that torch runs as one fused function.
FUSED = {"_transformer_encoder_layer_fwd", "_native_multi_head_attention"}
# Of angles: the last argument, or ``input``.
TRIGONOMETRIC = {"sin", "cos", "sin_", "cos_", "polar"}
