"""Small float64 twins, inputs, quiet forwards: how models are run to be measured."""
