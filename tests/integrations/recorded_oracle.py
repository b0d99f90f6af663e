"""Attention weights as a plain loop, to compare recordings with."""

import math

import torch


def weights_by_loop(q, k, may_look, *, sigma=None, scale=None, top_k=None):
    """Weights [B, H, Q, K] of q [B, H, Q, D] and k [B, Hk, K, D], one pair at a time.

    By distance with `sigma` [H], by products otherwise. ``may_look(b, h, i, j)`` says whether query
    i may look at key j.
    """
    B, H, Q, D = q.shape
    weights = torch.zeros(B, H, Q, k.shape[2], dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            keys = k[b, h // (H // k.shape[1])]
            for i in range(Q):
                logits = []
                for j in range(len(keys)):
                    if not may_look(b, h, i, j):
                        continue
                    if sigma is None:
                        logit = float(q[b, h, i] @ keys[j]) * (scale or D**-0.5)
                    else:
                        apart = float((q[b, h, i] - keys[j]).square().sum())
                        logit = -apart / (2 * float(sigma[h]) ** 2)
                    logits.append((logit, j))
                kept = sorted(logits, reverse=True)[:top_k]
                if kept:
                    top = kept[0][0]
                    total = sum(math.exp(logit - top) for logit, _ in kept)
                    for logit, j in kept:
                        weights[b, h, i, j] = math.exp(logit - top) / total
    return weights
