# A node of a cluster. CPU:  docker build -t partial-fc .
# CUDA (a base with nvcc, NCCL's headers and apt; TORCH_INDEX_URL is PyTorch's pip index for that CUDA version):
#   docker build -t partial-fc --build-arg BASE=nvidia/cuda:...-devel-ubuntu24.04 \
#       --build-arg TORCH_INDEX_URL=... --build-arg HOROVOD_GPU_OPERATIONS=NCCL .
# One host:    docker run --rm -it --shm-size=8g partial-fc bash scripts/demo.sh
# Several:     docker run -d --network=host --shm-size=8g -v DIR_WITH_ONE_KEY_PAIR:/root/.ssh partial-fc \
#                  bash -c 'ssh-keygen -A && exec /usr/sbin/sshd -D -p 2222'
#              on each (DIR holds id_ed25519, id_ed25519.pub and authorized_keys, owned by root), then inside one of them
#              horovodrun --ssh-port 2222 -np 2 -H first-host:1,second-host:1 bash config.sh
ARG BASE=debian:13-slim
FROM ${BASE}
ARG TORCH_INDEX_URL=
ARG HOROVOD_GPU_OPERATIONS=

WORKDIR /opt/partial-fc
# The set-up sees only the files that decide it, so that a change of the other sources does not build Horovod again. The
# two packages are what the editable installation points to; Horovod's build imports MXNet by way of ours.
COPY constraints.txt setup.cfg setup.py pyproject.toml README.md ./
COPY scripts/setup.sh scripts/build_horovod.sh scripts/
COPY partial_fc/__init__.py partial_fc/
COPY partial_fc/mxnet partial_fc/mxnet
COPY partial_fc/head/kernels/native partial_fc/head/kernels/native
RUN mkdir recipes && touch recipes/__init__.py && bash scripts/setup.sh \
    && rm -rf /root/.cache/pip /root/.cache/partial-fc/wheels /var/lib/apt/lists/*

# Host keys belong to a container, not to the image; containers are reached at addresses whose keys change.
RUN rm -f /etc/ssh/ssh_host_* && mkdir -p /run/sshd && printf '%s\n' \
    'Host *' '    StrictHostKeyChecking no' '    UserKnownHostsFile /dev/null' '    LogLevel ERROR' \
    > /etc/ssh/ssh_config.d/cluster.conf

COPY . .
ENV PATH=/opt/partial-fc/.venv/bin:$PATH
CMD ["bash"]
