"""The oracle: the tutorial's model in executable form, with one plain branch for every option of the real one.

float32, explicit [B, H, S, T] scores, a Python loop over layers; no scan, cache or mesh. It shares no code with the model that is
tested against it, only the parameter tree and the settings.
"""

import math

import jax
import jax.numpy as jnp


def linear(w, x):
    return x @ w


def rms_norm(scale, x, eps):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + eps) * scale


def layer_norm(scale, bias, x, eps):
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + eps) * scale + bias


def norm(params, x, cfg):
    if cfg.norm == "rms_norm":
        return rms_norm(params["scale"], x, cfg.norm_eps)
    if cfg.norm == "rms_norm_offset":
        return rms_norm(1 + params["scale"], x, cfg.norm_eps)
    if cfg.norm == "layer_norm":
        return layer_norm(params["scale"], params["bias"], x, cfg.norm_eps)
    if cfg.norm == "layer_norm_no_bias":
        return layer_norm(params["scale"], 0.0, x, cfg.norm_eps)
    raise AssertionError(cfg.norm)


def llama3_frequency(frequency, a):
    """By wavelength, as Llama 3.1 is described: long ones stretched, short ones unchanged, those between interpolated."""
    wavelength = 2 * math.pi / frequency
    if wavelength > a.rope_original_len / a.rope_low_freq_factor:
        return frequency / a.rope_factor
    if wavelength < a.rope_original_len / a.rope_high_freq_factor:
        return frequency
    smooth = a.rope_original_len / wavelength - a.rope_low_freq_factor
    smooth = smooth / (a.rope_high_freq_factor - a.rope_low_freq_factor)
    return (1 - smooth) * frequency / a.rope_factor + smooth * frequency


def rotate_half_split(x, positions, cfg):
    """x [B, H, S, K] with pairs (i, i + K/2) rotated by position * base^(-2i/K)."""
    K = x.shape[-1]
    columns = []
    for i in range(K // 2):
        frequency = cfg.attention.rope_base ** (-2 * i / K)
        if cfg.positions == "rope_llama3":
            frequency = llama3_frequency(frequency, cfg.attention)
        angle = positions[:, None, :] * frequency
        a, b = x[..., i], x[..., i + K // 2]
        columns.append((a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)))
    return jnp.stack([c[0] for c in columns] + [c[1] for c in columns], axis=-1)


def causal_self_attention(params, x, cfg, kind, positions, segments):
    B, T, D = x.shape
    a = cfg.attention
    H = a.num_heads
    G = a.num_kv_heads if a.num_kv_heads is not None else H
    K = a.head_dim if a.head_dim is not None else D // H

    q = linear(params["q"].reshape(D, H * K), x)
    k = linear(params["k"].reshape(D, G * K), x)
    v = linear(params["v"].reshape(D, G * K), x)
    if a.bias != "none":
        q = q + params["q_bias"].reshape(-1)
        k = k + params["k_bias"].reshape(-1)
        v = v + params["v_bias"].reshape(-1)

    def split_heads(t, heads):
        return t.reshape(B, T, heads, K).transpose(0, 2, 1, 3)

    if a.qk_norm and a.qk_norm_over == "heads":
        q = rms_norm(params["q_norm"].reshape(-1), q, a.qk_norm_eps)
        k = rms_norm(params["k_norm"].reshape(-1), k, a.qk_norm_eps)
    q, k, v = split_heads(q, H), split_heads(k, G), split_heads(v, G)
    if a.qk_norm and a.qk_norm_over == "head":
        q = rms_norm(params["q_norm"], q, a.qk_norm_eps)
        k = rms_norm(params["k_norm"], k, a.qk_norm_eps)
    if cfg.positions in ("rope", "rope_llama3"):
        q = rotate_half_split(q, positions, cfg)
        k = rotate_half_split(k, positions, cfg)

    # Query head h reads key/value head h // (H / G).
    k = jnp.stack([k[:, h // (H // G)] for h in range(H)], axis=1)
    v = jnp.stack([v[:, h // (H // G)] for h in range(H)], axis=1)

    scores = (q @ k.swapaxes(-1, -2)) * (K**-0.5 if a.scale is None else a.scale)
    if a.softcap is not None:
        scores = a.softcap * jnp.tanh(scores / a.softcap)
    mask = jnp.tril(jnp.ones((T, T), dtype=bool))
    if kind == "sliding":
        mask = mask & ~jnp.tril(jnp.ones((T, T), dtype=bool), -a.window)
    mask = mask[None, None]
    if segments is not None:
        mask = mask & (segments[:, None, :, None] == segments[:, None, None, :])
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)

    context = (weights @ v).transpose(0, 2, 1, 3).reshape(B, T, H * K)
    y = linear(params["o"].reshape(H * K, D), context)
    return y + params["o_bias"] if a.bias == "qkvo" else y


def mlp(params, x, cfg):
    """The feed-forward layer of these parameters, for the settings of a model."""

    def product(name, x):
        y = linear(params[name], x)
        return y + params[name + "_bias"] if cfg.mlp.bias else y

    kind = cfg.mlp.kind
    h = product("up", x)
    if kind == "gelu":
        h = 0.5 * h * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    elif kind == "gelu_erf":
        h = 0.5 * h * (1 + jax.lax.erf(h / math.sqrt(2)))
    elif kind == "relu_squared":
        h = jnp.where(h > 0, h, 0) ** 2
    elif kind == "swiglu":
        g = product("gate", x)
        h = g / (1 + jnp.exp(-g)) * h
    elif kind == "geglu":
        g = product("gate", x)
        h = 0.5 * g * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * h
    else:
        raise AssertionError(kind)
    return product("down", h)


def shares(logits, bias, m):
    """[B, T, E]: with which weight a token uses each expert, 0 where it does not; and probabilities for the balance loss."""
    E = logits.shape[-1]
    if m.router == "sigmoid":
        scores = 1 / (1 + jnp.exp(-logits))
        choice = scores + bias
        of_group = [choice[..., g * E // m.groups : (g + 1) * E // m.groups] for g in range(m.groups)]
        best_two = jnp.stack([jnp.sort(c, axis=-1)[..., -2:].sum(-1) for c in of_group], axis=-1)
        allowed = ranks(best_two) < m.groups_per_token
        choice = jnp.where(jnp.repeat(allowed, E // m.groups, axis=-1), choice, -jnp.inf)
        probabilities = scores / scores.sum(-1, keepdims=True)
    else:
        choice = logits
        scores = probabilities = jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True)
    weights = jnp.where(ranks(choice) < m.experts_per_token, scores, 0)
    if m.router == "softmax_of_chosen" or m.normalise_weights:
        weights = weights / weights.sum(-1, keepdims=True)
    return weights * m.router_scale, probabilities


def ranks(x):
    """How many entries of the last dimension are larger than each, or equal and before it."""
    E = x.shape[-1]
    ahead = [[x[..., j] >= x[..., i] if j < i else x[..., j] > x[..., i] for j in range(E) if j != i] for i in range(E)]
    return jnp.stack([sum((a.astype(int) for a in row), jnp.zeros(x.shape[:-1], int)) for row in ahead], axis=-1)


def moe(params, x, cfg):
    """Every expert on every token, times its weight; and what the losses of balance need."""
    logits = linear(params["router"], x)
    weights, probabilities = shares(logits, params.get("router_bias"), cfg.mlp)
    y = jnp.zeros_like(x)
    for e in range(cfg.mlp.experts):
        y = y + weights[..., e : e + 1] * mlp(one_layer(params["experts"], e), x, cfg)
    if cfg.mlp.shared:
        y = y + mlp(params["shared"], x, cfg)
    return y, (logits, weights > 0, probabilities)


def block(params, x, cfg, kind, positions, segments, routed):
    y = norm(params["attention_norm"], x, cfg)
    y = causal_self_attention(params["attention"], y, cfg, kind, positions, segments)
    if cfg.post_norms:
        y = norm(params["attention_post_norm"], y, cfg)
    x = x + y
    y = norm(params["mlp_norm"], x, cfg)
    if "router" in params["mlp"]:
        y, found = moe(params["mlp"], y, cfg)
        routed.append(found)
    else:
        y = mlp(params["mlp"], y, cfg)
    if cfg.post_norms:
        y = norm(params["mlp_post_norm"], y, cfg)
    return x + y


def one_layer(stack, i):
    return jax.tree.map(lambda a: a[i], stack)


def layers_of(params, cfg):
    """The parameters of each layer. Dense layers before a mixture, if any, are stacked apart from those that follow."""
    kinds = 1 if cfg.pattern is None else len(cfg.pattern)
    routed = cfg.mlp.router != "none"
    first = min(cfg.mlp.dense_first, cfg.num_layers) if routed else 0
    period = math.lcm(kinds, cfg.mlp.every) if routed else kinds
    before = [one_layer(params["blocks"][i % kinds], i // kinds) for i in range(first)]
    stacks = params["blocks"][min(first, kinds) :]
    return before + [one_layer(stacks[i % period], i // period) for i in range(cfg.num_layers - first)]


def model(params, token_ids, cfg, positions=None, segments=None, routed=None):
    """float32 logits [B, T, V]; routed: a list to which each mixture adds (logits, used, probabilities), [B, T, E]."""
    B, T = token_ids.shape
    if positions is None:
        positions = jnp.stack([jnp.arange(T)] * B)
    x = params["embedding"][token_ids]
    if cfg.embedding_scale is not None:
        x = x * cfg.embedding_scale
    if cfg.positions == "learned":
        x = x + params["position_embedding"][positions]

    period = cfg.pattern if cfg.pattern is not None else (cfg.attention.kind,)
    routed = [] if routed is None else routed
    for i, layer in enumerate(layers_of(params, cfg)):
        x = block(layer, x, cfg, period[i % len(period)], positions, segments, routed)

    x = norm(params["final_norm"], x, cfg)
    logits = linear(params["embedding"].T if cfg.tie_embeddings else params["head"], x)
    return logits if cfg.logit_softcap is None else cfg.logit_softcap * jnp.tanh(logits / cfg.logit_softcap)


def cross_entropy(logits, targets, weights):
    """Sum of weighted per-token losses divided by the sum of weights."""
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
    return -(chosen * weights).sum() / weights.sum()


def balance_loss(used, probabilities, weights, segments, cfg):
    """Mean over sequences, by their weight, of the experts' shares of use times their mean probability; 1 if equal."""
    total, E = 0.0, used.shape[-1]
    if segments is None:
        segments = jnp.zeros(weights.shape, int)
    for s in range(weights.shape[1]):  # no row has more sequences than tokens
        w = jnp.where(segments == s, weights, 0)
        counted = (w > 0)[..., None]
        f = (used & counted).sum(1) * E / (cfg.mlp.experts_per_token * jnp.maximum(counted.sum(1), 1))
        P = (probabilities * w[..., None]).sum(1)
        total = total + (f * P).sum()
    return total / weights.sum()


def loss_fn(params, batch, cfg, z_loss=None, balance=None, router_z=None):
    """Loss of next tokens, plus the others by their weights; None: not computed."""
    routed = []
    logits = model(params, batch["inputs"], cfg, batch.get("positions"), batch.get("segments"), routed)
    weights = batch["weights"]
    mean_square = lambda logits: (jnp.log(jnp.exp(logits).sum(-1)) ** 2 * weights).sum() / weights.sum()
    loss = cross_entropy(logits, batch["targets"], weights)
    if z_loss is not None:
        loss = loss + z_loss * mean_square(logits)
    for scores, used, probabilities in routed:
        if balance is not None:
            uneven = balance_loss(used, probabilities, weights, batch.get("segments"), cfg)
            loss = loss + balance * uneven / len(routed)
        if router_z is not None:
            loss = loss + router_z * mean_square(scores) / len(routed)
    return loss


def sgd_step(params, batch, cfg, learning_rate, **losses):
    """(parameters after one step of plain SGD, loss before it, gradients)."""
    loss, grads = jax.value_and_grad(loss_fn)(params, batch, cfg, **losses)
    return jax.tree.map(lambda p, g: p - learning_rate * g, params, grads), loss, grads
