"""What several families of kernels use. It imports none of them."""
