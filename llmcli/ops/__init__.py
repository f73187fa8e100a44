"""Pure tensor functions without parameters and state. Axes: see each file's legend.

Every operation of the engine with its fast version, the op of `graph.ops` whose evaluation in
`evaluate` is its reference, and the models that use it. Without such an op, tests have
their own reference loop. PyTorch's functions are called directly where they suffice.

operation              fast version                   evaluated as         used by
---------------------  -----------------------------  -------------------  -----------------------
dot product            torch.dot, inside @            Score, Project       every score q · k
matrix-vector (GEMV)   linear.linear of one row       Project              every projection
16 bits to float32     product.product_float32        –                    logits, residual stream
outer product          torch.outer                    –                    linear attention's state
delta rule, in chunks  recurrence.recur_chunks        LinearMap, Mix       gated DeltaNet, a prompt
the same, a step       recurrence.recur_steps         StateAfter           gated DeltaNet, decoding
state space            the same, `plain`              the same             Mamba-2
map of a recurrence    recurrence.Map                 LinearMap            both, shown
decay of a state       recurrence.log_decays          LogDecay             both
past the state         recurrence.with_skip           Skip                 Mamba-2
Q, K, V projections    linear.linear of q|k|v, split  Project              attention
scaled scores          attention.scores               Score                attention, shown
attention              attention.attend               Score, Softmax, Mix  all but Mamba-2
a layer with W_o       attend, then linear.linear     the same, Project    the same
heads with own W       heads.to_columns, to_rows      –                    latent attention, a step
rotary positions       rope.rotate                    Rotate               all but GPT-2, Mamba-2
convolution            conv.causal_conv               Convolve             Mamba-2, gated DeltaNet
with a ring buffer     conv.convolve                  Convolve             the same, decoding
softmax                torch.softmax                  Softmax              attention, MoE, sampling
softmax in place       torch.softmax(…, out=itself)   Softmax              wherever x is not needed
RMSNorm                norm.rms_norm                  Scale, Normalize     Llama, Qwen, Gemma
LayerNorm              norm.layer_norm                Scale, Normalize     GPT-2
L2 norm                norm.l2_norm                   UnitLength           gated DeltaNet's q, k
SiLU                   activations.activation         Activate             SwiGLU, convolutions
GELU                   activations.activation         Activate             GPT-NeoX
GELU, tanh form        activations.gelu_tanh          Activate             GPT-2, Gemma
GELU, sigmoid form     activations.quick_gelu         Activate             gpt-oss, clamped
ReLU²                  activations.squared_relu       Activate             Nemotron-H
sigmoid                torch.sigmoid                  Activate, Share      gates, GLM-4's routing
softplus               activations.softplus           StepSize             Mamba-2, gated DeltaNet
tanh                   torch.tanh                     –                    GELU's form, soft caps
tanh soft cap          activations.soft_cap           SoftCap              Gemma 2, not Gemma 3
scores of experts      torch.softmax, torch.sigmoid   Share                routers, shared experts
choice of experts      routing.choose                 Choose               mixtures of experts
weights of experts     routing.weigh                  Weigh                the same
inputs of experts      elements.scale_rows            WeighInput           Llama 4
products with experts  product.routed_by_kernel       ExpertProject        the same
sum of experts         *, +                           SumExperts           the same
argmax                 engine.sampling.choose         –                    greedy decoding
temperature            engine.sampling.choose         –                    sampling
top-k, top-p           engine.sampling.choose         –                    sampling
sum, mean, max         torch.sum, mean, amax          –                    softmax, norms
reduction as a tree    inside the GPU's kernels       –                    every reduction
add                    +                              Add                  residual stream
multiply               *                              Gate, WeighInput     gates, Llama 4's experts
packed weights         quant.dequantize               –                    GGUF files

Common misconceptions:

- A GEMV has n·k multiply-adds for n·k weights, each read and used once: it is memory-bound.
- Softmax can be done in place: the sum is one number, known after the second pass.
- `S += k ⊗ v` is the update of plain linear attention; the gated delta rule first decays the state
and subtracts from v the state's current value for k.
- Without W_o after the concatenation, heads' results would stay in separate columns.
- SiLU is not an S-curve: it falls to its minimum of -0.278 at x = -1.278 and rises again.
- GELU is x · Φ(x); its tanh form approximates that product, not Φ.
- The sigmoid never reaches 0 or 1 in real numbers. In double precision it is 1 from 37 on
  (1 + exp(-37) rounds to 1) and 0 below -745.2 (exp underflows).
- A tree reduction takes ⌈log₂ n⌉ steps instead of n - 1: each step adds the second half of the
numbers to the first half in parallel. A sum's rounding error grows with log n.
"""
