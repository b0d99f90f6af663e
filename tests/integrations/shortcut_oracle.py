"""Small random models, and the Krause shortcut as plain loops over the paper's equations."""

import math

import torch
import transformers

from graphattn.integrations import transformers as gat

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
# head_dim is not hidden_size / heads in one of them, biases and norms are where a family has them
FAMILIES = {
    "Llama": {"head_dim": 8, "attention_bias": True},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"head_dim": 8, "sliding_window": 6},
}


def tiny_model(family="Llama", dtype=torch.float32, scale=4.0, **more):
    """A model whose weights are large enough for differences to show."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES[family] | more)
    config._attn_implementation = "sdpa"
    kind = getattr(transformers, f"{family}ForCausalLM")
    model = kind._from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
            else:
                parameter.add_(0.1 * torch.randn(parameter.shape, dtype=dtype))
    return model


def with_shortcut(family="Llama", *, dtype=torch.float32, model=None, **options):
    """A model with a shortcut that is far from its start: other weights, sigmas, gates."""
    model = tiny_model(family, dtype) if model is None else model
    options = {"window": 8, "top_k": 3, "lora_rank": None, "init_sigma": 2.0} | options
    gat.add_krause_shortcut(model, **options)
    disturb(model)
    return model


def disturb(model, seed=1):
    """Add noise to all trained parameters of the shortcut and of its adapters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and ("krause" in name or "lora_" in name):
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_((0.2 * noise).to(parameter.dtype))


def left_padded(lengths, tokens):
    """An attention mask [B, N]: the last n of `tokens` are real."""
    return (torch.arange(tokens) >= tokens - torch.tensor(lengths)[:, None]).long()


def krause_loop(query, key, value, sigma, keep, window, top_k):
    """[B, N, H, D]: one token, one head, one neighbour at a time.

    keep[b][i][j] says whether token i may see token j at all.
    """
    B, N, H, D = query.shape
    group = H // key.shape[2]
    out = torch.zeros(B, N, H, D, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            for i in range(N):
                near = []
                for j in range(max(0, i - window + 1), i + 1):
                    if keep[b][i][j]:
                        apart = query[b, i, h] - key[b, j, h // group]
                        near.append((float((apart * apart).sum()), j))
                near = sorted(near)[:top_k]
                if not near:
                    continue
                total = sum(math.exp(-d / (2 * float(sigma[h]) ** 2)) for d, _ in near)
                for d, j in near:
                    weight = math.exp(-d / (2 * float(sigma[h]) ** 2)) / total
                    out[b, i, h] += weight * value[b, j, h // group]
    return out


def turned(x, rotations):
    """Rotary embedding, pair by pair: features d and d + D / 2 of x [B, N, H, D]."""
    cos, sin = rotations
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    for d in range(half):
        c, s = cos[..., d][..., None], sin[..., d][..., None]
        out[..., d] = x[..., d] * c - x[..., d + half] * s
        out[..., d + half] = x[..., d + half] * c + x[..., d] * s
    return out


def layer_loop(attention, standard, x, rotations, keep):
    """Compute a layer with a shortcut in plain loops; `standard` is its output without one."""
    krause = attention.krause
    B, N, _ = x.shape
    D = attention.head_dim

    def linear(module, z):
        bias = 0 if module.bias is None else module.bias
        return z @ module.weight.T + bias

    def norm(module, z):
        return z if module is None else module(z)  # the model's own

    query = norm(krause.q_norm, linear(krause.q_proj, x).view(B, N, -1, D))
    key = norm(krause.k_norm, linear(krause.k_proj, x).view(B, N, -1, D))
    value = linear(krause.v_proj, x).view(B, N, -1, D)
    query, key = turned(query, rotations), turned(key, rotations)
    sigma = krause.bandwidth.log_sigma.exp()
    out = krause_loop(query, key, value, sigma, keep, krause.window, krause.top_k)
    out = linear(krause.o_proj, out.flatten(-2))
    logits = linear(krause.gate, torch.cat([standard, out], -1))
    share = logits.exp() / logits.exp().sum(-1, keepdim=True)
    return share[..., :1] * standard + share[..., 1:] * out
