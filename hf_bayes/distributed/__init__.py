"""Chains on several processes: the (chain, data) mesh, and sums over members of different processes.

``mesh`` assigns chains and rows of data to the processes of one accelerate world, and exchanges values between them.
``member_sums`` averages the predictions of members that are held by different processes.
"""
