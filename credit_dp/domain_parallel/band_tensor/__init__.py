"""A tensor of the globe below autograd, beside the global view, whose place it is to take.

No model computes on it yet, but in tests.

| module | what it holds |
|---|---|
| `tensor` | `BandTensor`, how its rows are held, and the table of rules |
| `strides` | the strides of one process |
| `moving` | changes of layout, and copies that torch takes for views |
| `rules` | rules of all other operators, and what runs whole |
| `pointwise`, `views` | rules of families of operators |
| `interpolation` | interpolation, adaptive averages, pixel shuffles, samples of grids |
| `padding` | padding, rolls, flips and windows of rows |
| `boundary` | where a model begins and ends |
"""
