"""fdcache beside other systems: Paddle and FastDeploy."""
