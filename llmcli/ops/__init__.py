"""Pure tensor functions, without parameters and without state. Axes: see each file's legend.

Every operation of an inference engine, where its fast version is, its slow twin in `ops.twins`
(loops over Python floats), and which models use it. Where PyTorch's own function is all there
is to say, we call that and add no name of ours.

operation              fast version                    twin              used by
---------------------  ------------------------------  ----------------  ------------------------
dot product            torch.dot, inside @             dot               every score q · k
matrix-vector (GEMV)   linear.linear of one row        gemv              every projection
16 bits to float32     product.product_float32         dot_in_lanes      logits, residual stream
outer product          torch.outer                     outer             linear attention's state
Q, K, V projections    linear.linear of q|k|v, split   gemv, heads       attention
scaled scores          attention.scores                score             attention, shown
attention              attention.attend                attend            all but Mamba-2
a layer with W_o       nn.attention                    attention_layer   the same
rotary positions       rope.rotate                     rotate            all but GPT-2, Mamba-2
convolution            conv.causal_conv                causal_conv       Mamba-2, gated DeltaNet
with a ring buffer     conv.causal_conv_step, _chunk   causal_conv_step  the same, decoding
softmax                torch.softmax                   softmax           attention, MoE, sampling
softmax in place       torch.softmax(…, out=itself)    softmax_in_place  wherever x is not needed
RMSNorm                norm.rms_norm                   rms_norm          Llama, Qwen, Gemma
LayerNorm              norm.layer_norm                 layer_norm        GPT-2
L2 norm                norm.l2_norm                    l2_norm           gated DeltaNet's q, k
SiLU                   activations.activation          silu              SwiGLU, convolutions
GELU                   activations.activation          gelu              GPT-NeoX
GELU, tanh form        activations.gelu_tanh           gelu_tanh         GPT-2, Gemma
sigmoid                torch.sigmoid                   sigmoid           gates, GLM-4's routing
softplus               activations.softplus            softplus          Mamba-2, gated DeltaNet
tanh                   torch.tanh                      tanh              GELU's form, soft caps
tanh soft cap          activations.soft_cap            soft_cap          Gemma 2, not Gemma 3
argmax                 Tensor.max in sampling          argmax            greedy decoding
temperature            generation.sampling.filtered    temperature       sampling
top-k, top-p           generation.sampling.filtered    top_k, top_p      sampling
sum, mean, max         torch.sum, mean, amax           total, largest …  softmax, norms
reduction as a tree    inside the GPU's kernels        tree              every reduction
add, multiply          + and *                         add, mul          residual stream, gates
packed weights         quant.dequantize                in its tests      GGUF files
"""
