"""Dynamics of attention without weights: iterate attention, and study the clusters of tokens.

There are no layers and no training. Attention over a token graph updates the tokens repeatedly::

    x = ga.dynamics.standardize(features)                  # [tokens, features]
    trajectory = ga.dynamics.simulate(x, graph, steps=20)  # the tokens after every step
    labels = ga.dynamics.cluster(trajectory.updates[-1])   # the cluster of every token
    print(ga.dynamics.preview(x, graph))                   # compare with global attention

Sources: Attention Clusters (the iteration, its scores, the preview) and Krause Synchronization
Transformers (:func:`krause_flow`, :func:`consensus_flow` and :func:`persistent_groups`).
"""

from graphattn.dynamics.clusters import cluster, cluster_counts
from graphattn.dynamics.flows import ParticleFlow, consensus_flow, krause_flow
from graphattn.dynamics.leaders import Leaders, leader_tokens
from graphattn.dynamics.persistence import persistent_groups
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
    "persistent_groups",
    "preview",
    "silhouette",
    "simulate",
    "standardize",
]
