"""From a pretrained transformer to a model with recurrent memory: extract attention, convert, compare."""
