"""Windows on an image: squares and diamonds cut at the border, with and without a class token."""

import pytest
import torch_geometric.utils

import graphattn as ga

SHAPES = [(1, 1), (1, 2), (2, 1), (1, 6), (5, 1), (2, 2), (3, 4), (4, 3)]
RADII = [1, 2, 3, 9]


def distance(a: tuple[int, int], b: tuple[int, int], metric: str) -> int:
    dy, dx = abs(a[0] - b[0]), abs(a[1] - b[1])
    return max(dy, dx) if metric == "chebyshev" else dy + dx


@pytest.mark.parametrize("class_token", [False, True])
@pytest.mark.parametrize(("height", "width"), SHAPES)
@pytest.mark.parametrize("radius", RADII)
@pytest.mark.parametrize("metric", ["chebyshev", "manhattan"])
def test_grid_token_sees_the_tokens_within_radius_and_the_class_token_all(
    height, width, radius, metric, class_token, check_graph, mask_of
):
    cells = class_token * [None] + [(y, x) for y in range(height) for x in range(width)]

    def sees(i, j):
        of_class = class_token and (i == 0 or j == 0)
        return of_class or distance(cells[i], cells[j], metric) <= radius

    check_graph(
        ga.grid_window_graph(height, width, radius, metric=metric, class_token=class_token),
        mask_of(sees, len(cells)),
        place=None if class_token else lambda i: cells[i],
    )


@pytest.mark.parametrize(("height", "width"), [(2, 3), (5, 5), (4, 9)])
def test_radius_1_is_the_grid_of_torch_geometric(height, width):
    edge_index, _ = torch_geometric.utils.grid(height, width)
    assert ga.grid_window_graph(height, width, 1) == ga.from_edge_index(edge_index, height * width)


@pytest.mark.parametrize("metric", ["chebyshev", "manhattan"])
def test_a_grid_of_one_row_is_a_window_path(metric):
    for graph in (ga.grid_window_graph(1, 9, 2, metric=metric), ga.grid_window_graph(9, 1, 2)):
        assert graph == ga.window_path_graph(9, 2, self_loops=True)
