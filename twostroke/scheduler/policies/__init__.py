"""The policies: in which order samples get rows, and lose them. One file each, behind `scheduler.policy.Policy`."""
