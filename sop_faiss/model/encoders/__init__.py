"""Any encoder by the name that a user gives it: images in, one feature each out."""
