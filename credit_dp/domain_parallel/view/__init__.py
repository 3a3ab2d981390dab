"""The global view: tensors that show the globe's shape and hold this rank's band.

Code that reads sizes, makes coordinates or windows then runs as on one process, so that any torch
model is sharded as it is.

- `tensor` has the tensor, its layouts, and the two ways in which a function can always be called
  exactly: on bands that are cut alike, and whole, on gathered rows.
- `memory` lets all tensors that share memory on one process see what is written to one of them.
- `filling` lets tensors that a model makes and fills become bands.
- `function_rules` has the table of functions that need less than that, and what happens to all
  others.
- Rules of functions of each entry are in `pointwise`; of shapes, slices and concatenations in
  `shapes`, `indexing`, `joins` and `windows`; of sums, products and transforms in `reductions`,
  `products`, `attention` and `spectral`; of torch's layers in `layers` and `norms`; and of
  functions that are a few others in `composites`. `moves` moves bands to another dimension.
- `attach` attaches a view to a model: `boundary` shows its inputs through the view and takes its
  outputs out of it, `running` knows whether it runs, and `autograd` shows gradients to its code.
- `decide` and `dry_run` of the package above show what it costs, and refuse what costs too much.
"""
