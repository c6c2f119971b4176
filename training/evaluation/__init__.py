"""What is measured of a model: recall by probes, the cost of a context, which layers should stay attention."""
