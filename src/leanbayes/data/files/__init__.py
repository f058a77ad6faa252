"""Read the user's own data: `.npz` files, `.csv` files and folders of images."""
