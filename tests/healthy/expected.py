"""The findings of stock configs, each with its value and a kind, and for each kind the reason why it is true."""

BARE, LIFTED, INTENDED = "small embedding", "small embedding, then a norm", "small embedding, intended"
CONVOLUTION, STEPS, GAIN = "convolution", "steps", "gain of 2"
LINEAR, ATTENTION, UNUSED, SKIPPED = "linear updates", "attention updates", "mask token", "layer drop"
WIDE = "wide matrices"

# Per model and rule: the value of the first finding, and its kind.
EXPECTED: dict[str, dict[str, tuple[float, str]]] = {
    "GPT": {"PC205": (35.7, LIFTED)},
    "GPT-Neo 1.3B": {"PC205": (43.6, BARE)},
    "GPT-J 6B": {"PC205": (117, BARE)},
    "GPT-NeoX 20B": {"PC205": (183, BARE)},
    "OPT 350M": {"PC205": (53.4, LIFTED)},
    "OPT 6.7B": {"PC205": (91.6, BARE)},
    "Falcon 7B": {"PC205": (131, BARE)},
    "MPT 7B": {"PC205": (115, BARE)},
    "Persimmon 8B": {"PC205": (264, BARE)},
    "Llama 65B": {"PC205": (338, BARE)},
    "Llama 2 7B": {"PC205": (113, BARE)},
    "Llama 3 8B": {"PC205": (130, BARE)},
    "Mistral 7B": {"PC205": (129, BARE)},
    "Qwen2 7B": {"PC205": (130, BARE)},
    "Qwen3 8B": {"PC205": (122, BARE)},
    "Qwen3.8 27B": {"PC104": (1.31, STEPS), "PC205": (175, BARE), "PC207": (0.447, LINEAR), "PC208": (1.0, CONVOLUTION)},
    "Phi-2": {"PC205": (72.8, BARE)},
    "Phi-3 mini": {"PC205": (72.0, BARE)},
    "OLMo 7B": {"PC205": (117, BARE)},
    "OLMo 2 7B": {"PC205": (71.6, BARE)},
    "StableLM 3B": {"PC205": (54.7, BARE)},
    "StarCoder2 3B": {"PC205": (73.8, BARE)},
    "Nemotron-4 15B": {"PC106": (2.0, GAIN), "PC205": (843, BARE)},
    "SmolLM3 3B": {"PC205": (57.2, BARE)},
    "Command R 35B": {"PC205": (326, BARE)},
    "Command R7B": {"PC205": (122, BARE)},
    "GLM-4 9B": {"PC205": (127, BARE)},
    "GLM-4-0414 9B": {"PC205": (71.1, BARE)},
    "ERNIE 4.5 0.3B": {"PC205": (15.8, BARE)},
    "EXAONE 4 32B": {"PC205": (69.1, BARE)},
    "Apertus 8B": {"PC205": (296, BARE)},
    "Mixtral 8x7B": {"PC205": (101, BARE)},
    "DeepSeek-V2 Lite": {"PC205": (52.0, BARE)},
    "DeepSeek-V3": {"PC205": (257, BARE)},
    "Qwen3 30B-A3B": {"PC205": (17.2, BARE)},
    "Qwen3-Next 80B-A3B": {"PC104": (1.31, STEPS), "PC208": (1.0, CONVOLUTION)},
    "OLMoE 1B-7B": {"PC205": (16.6, BARE)},
    "gpt-oss 20B": {"PC205": (47.5, BARE)},
    "Mamba 130M": {"PC205": (444, WIDE)},
    "RWKV-4 169M": {"PC205": (11.4, BARE), "PC208": (1.0, INTENDED)},
    "Jamba v0.1": {"PC104": (0.693, STEPS), "PC205": (119, BARE), "PC207": (0.362, LINEAR)},
    "Bamba 9B": {"PC104": (1.31, STEPS), "PC205": (154, BARE)},
    "Zamba2 2.7B": {"PC205": (69.3, BARE)},
    "RecurrentGemma 2B": {"PC207": (0.463, LINEAR)},
    "LFM2 1.2B": {"PC205": (43.4, BARE), "PC207": (0.255, LINEAR)},
    "ModernBERT base": {"PC207": (0.261, ATTENTION)},
    "DINOv2 large": {"PC501": (1, UNUSED)},
    "Whisper small": {"PC205": (15.7, BARE)},
    "wav2vec 2.0 base": {"PC501": (16, SKIPPED)},
}

REASONS: dict[str, str] = {
    BARE: "The embedding has the std of the matrices (0.02 in most models) and is neither multiplied nor normalised. The first "
    "block reads it through a norm, so it writes at the scale of its own matrices, RMS 0.3 to 11. The value is the stream's "
    "RMS after the first block over that before it. Embeddings this small are tied to loss spikes, and embeddings of about 1 "
    "avoid them (Takase 2023, arXiv 2312.16903). The table also contains the controls: Gemma (times sqrt(width)), BLOOM (a "
    "norm after it), GPT-2 (outputs divided by sqrt(2 x layers)) and Granite (times 12, updates times 0.22) start without the "
    "jump and have no such finding.",
    WIDE: "transformers draws Mamba's embedding, in_proj and x_proj with initializer_range, which this config sets to 0.1. "
    "torch's default for a linear layer, which mamba_ssm keeps, is 1/sqrt(3 x 768) = 0.021. So the first block writes RMS 44 "
    "onto an embedding of 0.1.",
    LIFTED: "Post-norm: the embedding is as small, but a norm follows the first addition and brings the stream to 1, so only "
    "the first sublayer sees the jump. A note.",
    CONVOLUTION: "transformers draws the short convolution of Gated DeltaNet with the std of the matrices, 0.02; torch's "
    "default for 4 taps is 1/sqrt(12) = 0.29. Queries, keys and values come out small, the output of the core has RMS 1e-4 or "
    "less, and the norm after it divides by sqrt(eps) = 1e-3. In Qwen3.8-27B at full size it was measured as 1.4e-4, and the "
    "branch writes 0.17 to 0.20 instead of about 1.1.",
    INTENDED: "RWKV draws its embedding at scale 1e-4 on purpose and normalises it at once, so that it moves away quickly "
    "(arXiv 2305.13048, small init embedding). At the start, however, its variance of 1e-8 is below the norm's eps of 1e-5: "
    "the norm's output is 0.03 instead of 1. This is also why PC205 sees a small embedding there.",
    STEPS: "transformers' init leaves the step-size bias at 1 (Gated DeltaNet, Mamba-2 mixers) or 0 (Jamba), so softplus gives "
    "1.31 or 0.69, where Mamba (arXiv 2312.00752) draws 0.001 to 0.1. At the start, the state forgets within a few tokens "
    "(fla-org/flash-linear-attention issue 739). A note where the mixer is not a state-space model.",
    GAIN: "Nemotron's norm applies 1 + weight, and transformers' init sets the weight to 1: a gain of 2 in all 65 norms "
    "(huggingface/transformers issue 40224). A checkpoint overwrites it; a model trained from this init has it.",
    LINEAR: "The updates of linear attention, state-space and convolution mixers are small compared with a stream that the "
    "MLPs made large. bf16 keeps 8 bits, so an element below 1/512 to 1/256 of the stream's is lost. A normal update of 0.0065 "
    "of the stream loses 26 % (measured), and more if heads or tokens differ in size. A note.",
    ATTENTION: "ModernBERT draws output projections with std 0.02/sqrt(2 x layers) = 0.003 and attends to all tokens, so "
    "attention writes 0.007 of a stream of RMS 1. A note.",
    UNUSED: "The mask token replaces patches that are hidden in self-supervised training; a classifier hides none.",
    SKIPPED: "layerdrop is 0.1: in training mode layers are skipped at random, in this pass the first one. The value counts "
    "its parameters.",
}

_DEEPNORM = (
    "The config has DeepNorm's alpha = (2 x 80)^(1/4) = 3.5566 on every residual, but transformers draws all matrices with std "
    "0.02, without the factor (8 x 80)^(-1/4) = 0.199 that DeepNorm (arXiv 2203.00555) puts on value, output and FFN weights. "
    "Lightning attention has a norm inside, so it passes gradients more strongly than activations, and a norm on the stream "
    "follows each addition. So the gradient grows in every block on its way back by the factor above, 7 to 8 orders of "
    "magnitude over 80 blocks. With DeepNorm's own init (Xavier, those weights times 0.199), the same config has a flat "
    "gradient and no error."
)

# Not the initialisation that the model was trained from: an error that is true of what transformers builds.
NOT_AS_TRAINED: dict[str, tuple[str, float, str]] = {"MiniMax-Text-01": ("PC301", 1.26, _DEEPNORM)}
