# A node of a cluster. CPU:  docker build -t partial-fc .
# CUDA 13 (a base with nvcc, NCCL's headers and apt, Python 3.11 or newer; PyTorch's own build for it is in lock/):
#   docker build -t partial-fc --build-arg BASE=nvidia/cuda:...-devel-ubuntu24.04 --build-arg HOROVOD_GPU_OPERATIONS=NCCL .
# One host:    docker run --rm -it --shm-size=8g partial-fc bash scripts/demo.sh
# Several:     docker run -d --network=host --shm-size=8g -v DIR:/home/trainer/.ssh partial-fc \
#                  /usr/sbin/sshd -D -e -f /etc/ssh/sshd_cluster
#              on each, then inside one of them
#              horovodrun --ssh-port 2222 -np 2 -H first-host:1,second-host:1 bash config.sh
#
# Nothing here runs as root. DIR is a host's own, owned by user 1000, mode 700, and holds
#   id_ed25519, id_ed25519.pub, authorized_keys     the key that the hosts log in with
#   ssh_host_ed25519_key, its -cert.pub             this host's, signed by the cluster's authority:
#   known_hosts                                     one line that believes the authority, and nobody else
# An authority is a key pair that stays off the cluster (`ssh-keygen -t ed25519 -f authority`). Two commands per host:
#   ssh-keygen -q -t ed25519 -N '' -f DIR/ssh_host_ed25519_key
#   ssh-keygen -q -s authority -h -I HOST -n HOST,ADDRESS DIR/ssh_host_ed25519_key.pub
# and one known_hosts for all:  echo "@cert-authority * $(cat authority.pub)" >DIR/known_hosts
#
# The base is the index of all its platforms. A newer one: `docker buildx imagetools inspect debian:13-slim`.
ARG BASE=debian:13-slim@sha256:d7e12182ce18b85b93007c1dedf31f2d29e01ccf3182cc4017c709b6259bc132
FROM ${BASE}
ARG TORCH_INDEX_URL=
ARG HOROVOD_GPU_OPERATIONS=

WORKDIR /opt/partial-fc
# The set-up sees only the files that decide it, so that a change of the other sources does not build Horovod again. The
# two packages are what the editable installation points to; Horovod imports these modules of ours.
COPY constraints.txt setup.cfg setup.py pyproject.toml README.md ./
COPY lock lock
COPY scripts/setup.sh scripts/build_horovod.sh scripts/
COPY patches patches
COPY partial_fc/__init__.py partial_fc/on_demand.py partial_fc/files.py partial_fc/recipe_table.py partial_fc/
COPY recipes/__init__.py recipes/
COPY recipes/mxnet/__init__.py recipes/mxnet/library.py recipes/mxnet/
COPY partial_fc/head/native partial_fc/head/native
RUN bash scripts/setup.sh \
    && apt-get install -y --no-install-recommends openssh-server \
    && .venv/bin/python partial_fc/head/native/build.py all \
    && rm -rf /root/.cache/pip /root/.cache/partial-fc/wheels /var/lib/apt/lists/*

# Host keys belong to a host, not to the image. Ubuntu's bases have a user 1000 already.
RUN rm -f /etc/ssh/ssh_host_* && mkdir -p /run/sshd \
    && if getent passwd 1000 >/dev/null; then userdel --remove "$(getent passwd 1000 | cut -d: -f1)"; fi \
    && useradd --uid 1000 --create-home --shell /bin/bash trainer \
    && printf '%s\n' 'Host *' '    StrictHostKeyChecking yes' '    BatchMode yes' '    LogLevel ERROR' \
        >/etc/ssh/ssh_config.d/cluster.conf \
    && printf '%s\n' 'Port 2222' 'HostKey /home/trainer/.ssh/ssh_host_ed25519_key' \
        'HostCertificate /home/trainer/.ssh/ssh_host_ed25519_key-cert.pub' 'AllowUsers trainer' 'UsePAM no' \
        'PasswordAuthentication no' 'KbdInteractiveAuthentication no' 'PidFile none' 'MaxStartups 100' \
        >/etc/ssh/sshd_cluster

COPY . .
RUN .venv/bin/python -m compileall -q partial_fc recipes
# What the program writes into its own folder: the demo's data, runs.
RUN mkdir -p demo runs build && chown trainer demo runs build
ENV PATH=/opt/partial-fc/.venv/bin:$PATH
USER trainer
CMD ["bash"]
