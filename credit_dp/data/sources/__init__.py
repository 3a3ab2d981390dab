"""Where fields are read from: one class for each form of store, all alike to who reads them."""
