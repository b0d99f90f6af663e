"""Mutations of what loads later: torch_geometric behind layers, torch behind the command."""

from mutation import Mutation

LATE_TESTS = "tests/nn/test_nn_late_pyg.py"
LATE = f"{LATE_TESTS}::test_a_layer_is_a_message_passing_layer_as_soon_as_there_is_such_a_thing"
MEMBERS = f"{LATE_TESTS}::test_members_of_message_passing_are_known"
IMPORTS = "tests/test_imports.py"
PYG = "graphattn/nn/base/message_passing.py"

MUTATIONS = [
    Mutation(
        "completing a layer forgets that it is explained",
        PYG,
        "stored.setdefault(name, new[name])",
        "own[name] = new[name]",
        (LATE,),
    ),
    Mutation(
        "layers made before torch_geometric never become message passing layers",
        PYG,
        "after_import(PYG, replace)",
        "after_import(PYG, lambda: None)",
        (LATE,),
    ),
    Mutation(
        "a method that torch_geometric brings counts as an override",
        "graphattn/nn/base/overrides.py",
        "known[name] = getattr(base, name)",
        "pass",
        (LATE,),
    ),
    Mutation(
        "a layer is completed although torch_geometric is not there",
        "graphattn/nn/base/graph_layer.py",
        "if is_imported() or overridden_edges",
        "if True or overridden_edges",
        (LATE,),
    ),
    Mutation(
        "a copy without PyG's inspector goes to PyG",
        "graphattn/nn/base/graph_layer.py",
        'if "inspector" in state:',
        "if True:",
        (LATE,),
    ),
    Mutation(
        "a member of message passing is not known before the import",
        PYG,
        '"special_args", "update",',
        '"special_args",',
        (MEMBERS,),
    ),
    Mutation(
        "a decorator imports torch's compiler",
        "graphattn/late_imports.py",
        "    def decorate(function: F) -> F:\n",
        "    def decorate(function: F) -> F:\n        import torch._dynamo\n\n",
        (f"{IMPORTS}::test_nothing_heavy_is_imported_that_is_not_used[a first layer]",),
    ),
    Mutation(
        "operators wait until a name of graphattn is used",
        "graphattn/__init__.py",
        'after_import("torch", _load_with_torch)',
        "pass",
        (f"{IMPORTS}::test_operators_are_registered_and_names_are_there_in_any_order_of_imports",),
    ),
    Mutation(
        "names load while a part of graphattn is still loading torch",
        "graphattn/__init__.py",
        "for name in set(sys.modules) - _BEFORE_TORCH",
        "for name in ()",
        (f"{IMPORTS}::test_operators_are_registered_and_names_are_there_in_any_order_of_imports",),
    ),
    Mutation(
        "the command imports torch for its help",
        "graphattn/cli/terminal.py",
        "from typing import TYPE_CHECKING\n",
        "from typing import TYPE_CHECKING\n\nimport torch\n",
        (f"{IMPORTS}::test_help_and_a_mistyped_option_do_not_wait_for_torch[--help]",),
    ),
]
