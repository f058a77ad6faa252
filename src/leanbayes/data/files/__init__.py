"""Read the data files of a user: .csv, .npz, folders of images."""
