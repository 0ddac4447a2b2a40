"""The manifests and the image, checked without a cluster."""
