"""The seams to SGLang: the only place, beside the plugin entry, that imports it."""
