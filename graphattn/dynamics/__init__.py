"""Dynamics of attention without any weights: iterate it, and look at the clusters.

No layer is trained, none is even made. A cloud of tokens moves along a token graph::

    x = ga.dynamics.standardize(features)                  # [tokens, features]
    trajectory = ga.dynamics.simulate(x, graph, steps=20)  # every state on the way
    labels = ga.dynamics.cluster(trajectory.updates[-1])   # which tokens merged
    print(ga.dynamics.preview(x, graph))                   # a pattern against global attention

Sources: Attention Clusters (the iteration, its scores, the preview) and Krause Synchronization
Transformers (:func:`krause_flow` against :func:`consensus_flow`).
"""

from graphattn.dynamics.clusters import cluster, cluster_counts
from graphattn.dynamics.flows import ParticleFlow, consensus_flow, krause_flow
from graphattn.dynamics.leaders import Leaders, leader_tokens
from graphattn.dynamics.preview import PatternScores, Preview, preview
from graphattn.dynamics.scores import (
    Fragmentation,
    dice,
    fragmentation,
    label_accuracy,
    participation_ratio,
    silhouette,
)
from graphattn.dynamics.simulate import Trajectory, simulate, standardize

__all__ = [
    "Fragmentation",
    "Leaders",
    "ParticleFlow",
    "PatternScores",
    "Preview",
    "Trajectory",
    "cluster",
    "cluster_counts",
    "consensus_flow",
    "dice",
    "fragmentation",
    "krause_flow",
    "label_accuracy",
    "leader_tokens",
    "participation_ratio",
    "preview",
    "silhouette",
    "simulate",
    "standardize",
]
