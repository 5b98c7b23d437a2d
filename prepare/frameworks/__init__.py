"""Apply a recipe in another framework: one module for each, which needs the framework's package.

`lightning.Prepare`, `accelerate.prepare`, `transformers.PrepareCallback`, `monai.PrepareHandler`,
`nnunet.PrepareTrainer`, `diffusers.prepare`. Importing this package imports none of them.
"""
