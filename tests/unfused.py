"""What a pass emits, and of softmax attention by definition what no fused kernel has."""

import torch
from decoder_parameters import parameters_of


def emitted(model, ids, state=None):
    """By name, without the axis of the batch."""
    seen = {}
    model.decoder(torch.tensor([ids]), state, tap=lambda name, x: seen.setdefault(name, x[0]))
    return seen


def attention_of(model, seen, dtype=torch.float64):
    """Scores, pattern and result of every layer by name, from what was `emitted`, `seen`."""
    found, slots = {}, parameters_of(model.decoder)
    for i, layer in enumerate(model.config.layers):
        at, mixer = f"blocks.{i}.attn", layer.attention
        q, k = (
            next(seen[name] for end in ("_rot", "_norm", "") if (name := f"{at}.{x}{end}") in seen)
            for x in "qk"
        )
        k = k.to(dtype).repeat_interleave(mixer.heads // mixer.kv_heads, 0)
        rows = torch.arange(q.shape[1])
        hidden = rows > rows[:, None]
        if mixer.scores.window is not None:
            hidden |= rows <= rows[:, None] - mixer.scores.window
        scores = (q.to(dtype) @ k.mT * mixer.scores.scale).masked_fill(hidden, -torch.inf)
        shares = scores
        if mixer.scores.sinks:  # a key more that has no value
            sinks = slots[f"{at}.sink"].to(dtype)[:, None, None]
            shares = torch.cat((scores, sinks.expand(-1, len(rows), 1)), -1)
        w_HeD = slots[f"{at}.W_o"].to(dtype).t().unflatten(0, (mixer.heads, -1))
        found |= {
            f"{at}.scores": scores, f"{at}.pattern": shares.softmax(-1)[..., : len(rows)],
            f"{at}.result": seen[f"{at}.z"].to(dtype) @ w_HeD,
        }  # fmt: skip
    return found
