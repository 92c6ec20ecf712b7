"""The hardware catalogue as data: accelerators, links, prices, grids, cooling, each value with its source and date."""
