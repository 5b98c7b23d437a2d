"""A plugin that cannot be imported, as happens after an upgrade of something it needs."""

import a_package_that_is_not_installed  # noqa: F401
