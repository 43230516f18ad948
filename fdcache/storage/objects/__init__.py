"""Objects of many nodes: in a bucket, or in one folder of a shared file system."""
