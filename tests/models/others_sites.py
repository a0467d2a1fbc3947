"""The residual additions (sites) of one training forward call of each model in ``others``, read in transformers 5.24.

A site is one update that a branch adds to the stream, as in ``causal_lm_sites``. Encoders and decoders count alike; so does
what adds to the stream outside of the blocks.
"""

OTHERS_SITES: dict[str, int] = {
    # 3 layers of attention and feed-forward. The norm stands behind each addition, norm(x + F), in the family of BERT.
    "albert": 6,  # one layer, run three times
    "bert": 6,
    "distilbert": 6,
    "electra": 6,
    "fnet": 6,  # a Fourier transform for attention
    "longformer": 6,
    "modernbert": 6,
    "roberta": 6,
    "xlnet": 6,  # [T, B, D]; the query stream does not run without a target mapping
    "reformer": 6,  # reversible: x1 + attention(x2), x2 + feed_forward(y1), in a custom autograd function
    "deberta-v2": 7,  # after the first layer, its output + conv(embeddings)
    "funnel": 9,  # 3 encoder layers, 1 decoder layer; between them the first block's output + the upsampled last one's
    "perceiver": 9,  # cross-attention onto the latents 2, self-attention 3 * 2; the decoder's has no query residual: its MLP
    # 3 encoder layers of 2, 3 decoder layers of 3: self-attention, cross-attention, feed-forward
    "bart": 15,
    "mbart": 15,
    "pegasus": 15,
    "marian": 15,
    "t5": 15,
    "whisper": 15,
    "speech-to-text": 15,
    # 3 layers of 2, and before them x + conv(x), the positional embedding
    "wav2vec2": 7,
    "hubert": 7,
    # 3 layers of 2
    "ast": 6,
    "vit": 6,
    "deit": 6,
    "dinov2": 6,  # each update times a learned vector
    "beit": 6,  # the same
    "videomae": 6,
    "swin": 8,  # 2 stages of 2 layers; a new stream starts where patches are merged
    "convnext": 5,  # 5 layers, one convolutional branch each
    "poolformer": 10,  # 5 layers: pool(x) - x, and two 1x1 convolutions
    "segformer": 10,  # 5 layers; the head concatenates
    # ResNet: its first stage adds to the input itself, the three others to a projection of it, a product of its own: 1.
    # Encoder 3 * 2, decoder 3 * 3: the first self-attention adds to queries that are zeros.
    "detr": 16,
    # Swin 4 * 2, deformable encoder 2 * 2, one level of the pyramid (the upsampled stream + a lateral convolution), and 3 mask
    # decoder layers (the config's 4 count the one before the first) of 3
    "mask2former": 22,
    # two towers of 3 layers
    "clip": 12,
    "siglip": 13,  # and the MLP of the pooling head
    "blip": 15,  # vision 3 * 2; text 3 * 3, with a cross-attention
}
