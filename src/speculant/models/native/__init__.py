"""Models on the native kernels."""
