"""A tensor of the globe below autograd: models that mix rows anywhere compute on it.

| module | what it holds |
|---|---|
| `tensor` | `BandTensor`, how its rows are held, and the table of rules |
| `strides` | the strides of one process |
| `moving` | changes of layout, and copies that torch takes for views |
| `rules` | rules of all other operators, and what runs whole |
| `pointwise` | rules of operators on entries at the same place |
| `views`, `joins` | views, joins and repeats |
| `indexing`, `scatters` | indices, gathers, scatters and tables |
| `filling` | tensors that a model makes and fills |
| `convolutions`, `pooling` | operators with halos |
| `interpolation` | interpolation, adaptive averages, pixel shuffles, samples of grids |
| `reductions`, `norms`, `losses` | operators with moments and sums of the whole globe |
| `fused` | linear layers and norms in one node of autograd |
| `products`, `attention`, `spectral`, `recurrent` | operators that mix rows with each other |
| `padding` | padding, rolls, flips and windows of rows |
| `gradients` | gradients in parts, and in the bands of the forward |
| `fetched` | rows of other bands, fetched once for all that read them |
| `random`, `values` | random numbers, and what Python reads of a tensor |
| `parameters` | the edge between parameters and fields, in both directions |
| `boundary` | where a model begins and ends, and how it comes to compute on bands |
"""
