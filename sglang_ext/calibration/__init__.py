"""Calibration: what is measured once per model over a development set and written into its profile.

Pure torch: inputs are tensors of captured queries and keys, results are plain values; running the model is the
command's part. In the order of the command's steps: `prompts` (the data), `prompt_capture` (what the model made of a
prompt), `layer_statistics`, `channels` and `measurement` (what is measured of it, one file per prompt), `block_size`,
`plans` and `fit` (from measurements to settings), `judge` (which proposal is recommended, by `agreement`), `report` and
`report_plots` (which imports matplotlib). `published` reads others' head maps.
"""
