"""Config groups for Hydra: an installed package is found with `hydra.searchpath=[pkg://prepare.conf]`."""
