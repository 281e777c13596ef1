#!/usr/bin/env bash
# Builds a wheel of Horovod, version $2, with the interpreter $1 and leaves it in folder $3 (107 s of processor time).
# MXNet among the other arguments: for it, too; always for PyTorch, over MPI and Gloo.
#
# The release is from 2023 and asks for C++14; torch 2.13's headers need 20 and MXNet's stop at 17, so the two standards
# are set per sub-project. It is built without debug information, Gloo leaves the size of send buffers to the kernel,
# horovodrun waits two seconds, not minutes, for a host that does not answer, its store answers only who signs with its
# token, ssh checks the keys of hosts, it leaves the command's flags alone, and a process that waits for a collective
# leaves its core to others, see below. Nothing else in the sources changes. HOROVOD_GPU_OPERATIONS and the like pass
# through.
set -euo pipefail
python=$1 version=$2 wheels=$3
if [[ " ${*:4} " == *" MXNet "* ]]; then mxnet=WITH; else mxnet=WITHOUT; fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

grep -q "^horovod==$version " "$root/lock/horovod.txt" ||
    { echo "build_horovod.sh: lock/horovod.txt has no SHA-256 of horovod $version" >&2; exit 1; }
# No build isolation anywhere: the sources must see this environment's torch and mxnet.
"$python" -m pip download --quiet --require-hashes --no-deps --no-binary horovod --no-build-isolation -d "$work" \
    -r "$root/lock/horovod.txt"
tar -xzf "$work/horovod-$version.tar.gz" -C "$work"
source="$work/horovod-$version"

# expect FILE TEXT: whatever is patched has to be there, before and after.
expect() {
    grep -qF "$2" "$source/$1" ||
        { echo "build_horovod.sh: horovod $version: $1 has no '$2'; its patch needs a new look" >&2; exit 1; }
}

# replace FILE OLD NEW: OLD, which has to be in FILE exactly once, becomes NEW.
replace() {
    "$python" - "$source/$1" "$2" "$3" <<'END' ||
import sys
path, old, new = sys.argv[1:]
with open(path) as file:
    text = file.read()
if text.count(old) != 1:
    sys.exit(1)
with open(path, "w") as file:
    file.write(text.replace(old, new))
END
        { echo "build_horovod.sh: horovod $version: $1 must have '$2' once; its patch needs a new look" >&2; exit 1; }
}

old='set(CMAKE_CXX_STANDARD 14)'
for file in CMakeLists.txt horovod/torch/CMakeLists.txt; do expect "$file" "$old"; done
sed -i "s/$old/set(CMAKE_CXX_STANDARD 17)/" "$source/CMakeLists.txt"
sed -i "s/$old/set(CMAKE_CXX_STANDARD 20)/" "$source/horovod/torch/CMakeLists.txt"

# CUDA only where it is asked for: CMake turns it on by itself where PyTorch's build has it and there is an nvcc, and then
# fails unless the whole toolkit is there; it fails even where it only finds part of one.
expect CMakeLists.txt '    find_package(CUDAToolkit)'
expect cmake/Modules/FindPytorch.cmake '(torch.version.cuda is not None)'
if [ -z "$(env | sed -n 's/^HOROVOD_GPU[A-Z_]*=//p')" ]; then
    sed -i '/^    find_package(CUDAToolkit)$/d' "$source/CMakeLists.txt"
    sed -i 's/(torch.version.cuda is not None)/False/' "$source/cmake/Modules/FindPytorch.cmake"
fi

# To compile less: what PyTorch's and MXNet's libraries share once for both; files by eights, which read a header once.
# (With CUDA there is PyTorch's alone, and its folder may add to the sources.)
if [ -z "$(env | sed -n 's/^HOROVOD_GPU[A-Z_]*=//p')" ]; then
    replace CMakeLists.txt $'# TF\n' "$(cat <<'END'
add_library(horovod_common OBJECT ${SOURCES})
target_include_directories(horovod_common PRIVATE "${EIGEN_INCLUDE_PATH}" "${FLATBUFFERS_INCLUDE_PATH}")
set(SOURCES $<TARGET_OBJECTS:horovod_common>)
END
)"$'\n'
    replace CMakeLists.txt $'\nproject(horovod CXX)' $'\nproject(horovod CXX)\nset(CMAKE_UNITY_BUILD ON)'
    # It gives a name of its own to what another file means by it.
    file=third_party/gloo/gloo/CMakeLists.txt
    old='add_library(gloo ${GLOO_STATIC_OR_SHARED} ${GLOO_SRCS})'
    replace $file "$old" "$old"$'\nset_source_files_properties(allreduce.cc PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)'
fi

# MXNet 1.9.1 imports with today's numpy by way of partial_fc.mxnet only, in the build (with PYTHONPATH, below) and later.
expect cmake/Modules/FindMxnet.cmake 'import mxnet'
sed -i 's/import mxnet/import partial_fc.mxnet; &/' "$source/cmake/Modules/FindMxnet.cmake"
expect horovod/mxnet/__init__.py 'from horovod.common.util import check_extension'
sed -i 's/^from horovod.common.util import check_ext/import partial_fc.mxnet\n&/' "$source/horovod/mxnet/__init__.py"
expect horovod/mxnet/__init__.py 'import partial_fc.mxnet'

# An assignment to a constant, in a function that nobody calls: GCC 14 reports it all the same.
flatbuffers=third_party/flatbuffers/include/flatbuffers/stl_emulation.h
old='const size_type count_;'
expect $flatbuffers "$old"
sed -i "s/$old/${old#const }/" "$source/$flatbuffers"

# Debug information would be 110 of 116 MB installed, and a quarter of the time to build them.
old='string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO'
expect CMakeLists.txt "$old"
sed -i "s/$old/${old/-O2/-O2 -g}/" "$source/CMakeLists.txt"

# Gloo fixes each socket's send buffer at the size of its largest message so far, which turns the kernel's own sizing off.
# A loopback packet of 64 kB then fills it, the next waits for an acknowledgement, and that is delayed by 40 ms: gradients
# of 1 MB took 200 ms between two processes of one host (docs/log.md, 2026-11-20). Without a limit nothing is fixed.
pair=third_party/gloo/gloo/transport/tcp/pair.cc
old='kMaxSendBufferSize = 32 * 1024 * 1024'
expect $pair "$old"
sed -i "s/${old//\*/\\*}/kMaxSendBufferSize = 0/" "$source/$pair"
expect $pair 'kMaxSendBufferSize = 0'

# A process that waits for a collective asked again and again whether it is there, yielding in between, and kept a core
# busy: where cores are shared, that of the one it waits for. Now it sleeps for 50 us; a collective takes 1,000 or more.
file=horovod/torch/mpi_ops_v2.cc
replace $file 'std::this_thread::yield();' 'std::this_thread::sleep_for(std::chrono::microseconds(50));'

# Horovod's own thread looked for new tensors every HOROVOD_CYCLE_TIME, 1 ms, and asked all ranks each time whether they
# have any: a tenth of a core, all the time, and 2 to 3 ms until a collective began. Now who adds a tensor wakes it, and
# only what other ranks still lack is asked for again at that pace. Who has nothing to ask answers others after 20 ms.
# (Counted, not flagged: MXNet's and PyTorch's libraries may share these functions.)
file=horovod/common/tensor_queue
replace $file.h '#include <mutex>' $'#include <chrono>\n#include <cstdint>\n#include <mutex>'
replace $file.h 'class TensorQueue {' "$(cat <<'END'
// Sleeps until that time, or until a tensor has been added to any queue since `seen` was told last.
void WaitForTensors(std::chrono::steady_clock::time_point end, uint64_t& seen);

class TensorQueue {
END
)"
replace $file.h '  void RemoveJoinTensor();' $'  void RemoveJoinTensor();\n\n  bool IsEmpty() const;'
replace $file.cc '#include <assert.h>' $'#include <assert.h>\n#include <condition_variable>'
replace $file.cc '// Add a TensorTableEntry as well as its message to the queue.' "$(cat <<'END'
namespace {
std::mutex arrivals_mutex;
std::condition_variable arrivals_changed;
uint64_t num_arrivals = 0;

void TellOfTensors() {
  {
    std::lock_guard<std::mutex> guard(arrivals_mutex);
    ++num_arrivals;
  }
  arrivals_changed.notify_all();
}
} // namespace

void WaitForTensors(std::chrono::steady_clock::time_point end, uint64_t& seen) {
  std::unique_lock<std::mutex> lock(arrivals_mutex);
  arrivals_changed.wait_until(lock, end, [&seen] { return num_arrivals != seen; });
  seen = num_arrivals;
}

bool TensorQueue::IsEmpty() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return tensor_table_.empty();
}

// Add a TensorTableEntry as well as its message to the queue.
END
)"
replace $file.cc $'  message_queue_.push(std::move(message));\n  return Status::OK();' \
    $'  message_queue_.push(std::move(message));\n  TellOfTensors();\n  return Status::OK();'
replace $file.cc $'    message_queue_.push(std::move(messages[i]));\n  }\n' \
    $'    message_queue_.push(std::move(messages[i]));\n  }\n  TellOfTensors();\n'
replace horovod/common/global_state.h '  std::chrono::steady_clock::time_point last_cycle_start;' "$(cat <<'END'
  std::chrono::steady_clock::time_point last_cycle_start;

  // What WaitForTensors has told, and whether tensors still wait for other ranks.
  uint64_t num_arrivals_seen = 0;
  bool tensors_wait = false;
END
)"
file=horovod/common/operations.cc
replace $file '  auto start_time = std::chrono::steady_clock::now();
  auto sleep_duration = state.last_cycle_start +
                        std::chrono::microseconds(long(
                            state.parameter_manager.CycleTimeMs() * 1000.)) -
                        start_time;
  if (sleep_duration > std::chrono::steady_clock::duration::zero()) {
    std::this_thread::sleep_for(sleep_duration);
  }' "$(cat <<'END'
  auto longest = std::chrono::microseconds(
      long(state.parameter_manager.CycleTimeMs() * 1000.));
  if (!state.tensors_wait) {
    longest = std::max(longest, std::chrono::microseconds(20000));
  }
  WaitForTensors(state.last_cycle_start + longest, state.num_arrivals_seen);
END
)"
replace $file $'    should_shutdown |= response_list.shutdown();\n  }\n' "$(cat <<'END'
    should_shutdown |= response_list.shutdown();
  }

  state.tensors_wait = false;
  for (auto id : state.process_set_table.Ids()) {
    state.tensors_wait |= !state.process_set_table.Get(id).tensor_queue.IsEmpty();
  }
END
)"$'\n'

# An operation of MXNet may be done, and its names freed, before the function that handed it in has told of it by name: that
# function keeps a copy. (It waited for the next cycle before, which hid this.)
file=horovod/mxnet/mpi_ops.cc
expect $file '  auto process_set_id = ops_param->process_set_id;'
sed -i 's/ops_param->op_names/op_names/
    s/^  auto process_set_id = ops_param->process_set_id;/&\n  auto op_names = ops_param->op_names;/' "$source/$file"
expect $file '  auto op_names = ops_param->op_names;'

# Who waits for others in MPI asks without end, and yields at best, which the kernel takes for little where each rank has
# a session of its own. Here it sleeps for 50 us in between, after the first questions.
replace horovod/common/half.h '#include "mpi.h"' '#include "mpi/sleeping_mpi.h"'
{
    cat <<'END'
#pragma once

#include <chrono>
#include <thread>

#include "mpi.h"

template <typename Start> int SleepUntilDone(Start start) {
  MPI_Request request;
  int done = 0;
  int status = start(&request);
  for (int asked = 0; status == MPI_SUCCESS && !done; ++asked) {
    if (asked > 20) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    status = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
  }
  return status;
}

END
    for name in Allgather Allgatherv Allreduce Alltoall Alltoallv Barrier Bcast Gather Gatherv Reduce_scatter; do
        echo "#define MPI_$name(...) SleepUntilDone([&](MPI_Request* r) { return MPI_I${name,}(__VA_ARGS__, r); })"
    done
} >"$source/horovod/common/mpi/sleeping_mpi.h"

# horovodrun took `--network r50` of the command that it starts for a shortened flag of its own, and refused it: it has two
# that begin so. It takes no shortened flags now; all words from the command's first on are the command's.
parser="ArgumentParser(description='Horovod Runner'"
replace horovod/runner/launch.py "$parser)" "$parser, allow_abbrev=False)"
# One shortened flag is what everybody types first: `horovodrun --check`.
replace horovod/runner/launch.py "'-cb', '--check-build'," "'-cb', '--check-build', '--check',"

# It kept the results of its checks in ~/.horovod, and ended where that cannot be written; without a home it made a folder
# whose name is a tilde. There it checks anew. (/proc and /sys say that root may write there, and refuse it.)
file=horovod/runner/launch.py
replace $file '    if not args.disable_cache:' \
    '    if not args.disable_cache and os.access(os.path.expanduser("~"), os.R_OK | os.W_OK | os.X_OK):'
replace $file "$(cat <<'END'
        fn_cache = cache.Cache(CACHE_FOLDER, CACHE_STALENESS_THRESHOLD_MINUTES,
                               parameters_hash)
END
)" "$(cat <<'END'
        try:
            fn_cache = cache.Cache(CACHE_FOLDER, CACHE_STALENESS_THRESHOLD_MINUTES,
                                   parameters_hash)
        except OSError:
            pass
END
)"

# CVE-2024-10190: horovodrun's store listens on all addresses and unpickles what anybody puts there. Here it listens on the
# address that the processes are told, and refuses (403), before it reads on, whoever does not sign with the token that
# horovodrun makes (partial_fc/signature.py). The processes of this host inherit that, those of other hosts
# read it from ssh's standard input: words of a command line are for all users to see in /proc. (Horovod on Ray and on
# Spark, which pass nothing on, is left out.)
runner=horovod/runner
signature='from partial_fc import signature'
replace $runner/common/util/env.py 'secret.HOROVOD_SECRET_KEY}' 'secret.HOROVOD_SECRET_KEY, signature.TOKEN}'
replace $runner/common/util/env.py 'from horovod.runner.common.util import secret' \
    'from horovod.runner.common.util import secret'$'\n'"$signature"

file=$runner/http/http_server.py
old='from horovod.runner.util.network import find_port'
replace $file "$old" "$signature"$'\n'"$old"
replace $file '    # Override GET handler' "$(cat <<'END'
    # Of every request, whatever its method is.
    def parse_request(self):
        if not super().parse_request():
            return False
        if signature.is_right(self):
            return True
        self.send_status_code(403)
        return False

    # Override GET handler
END
)"
replace $file '        self._put_value(scope, key, value)' "$(cat <<'END'
        if not signature.is_right_body(self, value):
            self.send_status_code(403)
            return
        self._put_value(scope, key, value)
END
)"
made='        signature.make_token()'
replace $file 'def start(self, handler_cls=RendezvousHandler):' \
    "def start(self, handler_cls=RendezvousHandler, address=''):"$'\n'"$made"
replace $file 'addr, handler_cls, self._verbose))' 'addr, handler_cls, self._verbose), address)'
replace $file 'def start_server(self):' "def start_server(self, address=''):"$'\n'"$made"
replace $file 'addr, KVStoreHandler, self.verbose))' 'addr, KVStoreHandler, self.verbose), address)'
replace $runner/util/network.py 'def find_port(server_factory):' "def find_port(server_factory, address=''):"
replace $runner/util/network.py "addr = ('', port)" 'addr = (address, port)'

file=$runner/http/http_client.py
replace $file 'import codec' "import codec"$'\n'"$signature"
replace $file 'Request(url)' 'Request(url, headers=signature.headers("GET", url, None))'
replace $file 'scope, key, value):' 'scope, key, value, encode=lambda value: codec.dumps_base64(value, to_ascii=False)):'
replace $file 'req = Request(url, data=codec.dumps_base64(value, to_ascii=False))' \
    'body = encode(value)
        req = Request(url, headers=signature.headers("PUT", url, body), data=body)'

# Elastic processes tell it, as JSON, where they listen for news of hosts. The key of these notices is not sent any more.
file=$runner/elastic/worker.py
replace $file 'import os' $'import json\nimport os'
replace $file 'from horovod.runner.common.util import network, secret' \
    'from horovod.runner.common.util import network'$'\n'"$signature"
replace $file 'secret.make_secret_key()' 'signature.derived_key("notices")'
replace $file 'value = (self._service.addresses(), secret_key)' 'value = self._service.addresses()'
replace $file '                                  value)' '                                  value, lambda value: json.dumps(value).encode())'
file=$runner/elastic/rendezvous.py
replace $file 'import logging' $'import json\nimport logging'
replace $file 'from horovod.runner.common.util import codec' "$signature"
replace $file 'addresses, secret_key = codec.loads_base64(value)' \
    'addresses = {nic: [tuple(at) for at in listed] for nic, listed in json.loads(value).items()}
                secret_key = signature.derived_key("notices")'

# The elastic store is opened later than before: when it is known on which address.
file=$runner/gloo_run.py
start='    global_rendezv_port = rendezvous.start('
replace $file "$start)" "${start}address=server_ip)"
replace $file "${start}handler)"$'\n' ''
address='    server_ip = network.get_driver_ip(nics)'
replace $file "$address" "$address"$'\n'"${start}handler, server_ip)"
replace $file 'run_func_server.start_server()' 'run_func_server.start_server(server_ip)'
replace $runner/launch.py 'run_func_server.start_server()' 'run_func_server.start_server(driver_ip)'

# An elastic job without --network-interfaces waited for a second host without a word.
replace $file '        min_hosts = _get_min_start_hosts(settings)' "$(cat <<'END'
        min_hosts = _get_min_start_hosts(settings)
        if len(driver.wait_for_available_slots(settings.num_proc).available_hosts) < min_hosts:
            print('horovodrun waits for a second host, to find the network that both have (--elastic-timeout). To start '
                  'without: --network-interfaces NAME, that of the hosts\' network; lo for a job on this host alone.',
                  file=sys.stderr, flush=True)
END
)"

# What goes to other hosts: printf is the shell's own command, so the token is on no command line here, either.
replace $file 'import env as env_util, safe_shell_exec' \
    'import env as env_util, safe_shell_exec'$'\n'"$signature"
replace $file "quote('cd {pwd} > /dev/null 2>&1 ; {command}'" \
    "quote('exec sh -c ' + quote('read -r {token}; export {token}; cd {pwd} > /dev/null 2>&1 ; {command}'"
replace $file '.format(pwd=os.getcwd(), command=command))' \
    '.format(token=signature.TOKEN, pwd=os.getcwd(), command=command)))'
old='identity_file=settings.ssh_identity_file)'
send='            command = f'\''printf "%s\\n" "${signature.TOKEN}" | {command}'\'
replace $file "$old" "$old"$'\n'"$send"
# horovod.run(function) over MPI: mpirun is given the name alone.
file=$runner/mpi_run.py
replace $file 'safe_shell_exec, tiny_shell_exec' 'safe_shell_exec, tiny_shell_exec'$'\n'"$signature"
replace $file 'env_util.is_exportable(key))' 'env_util.is_exportable(key) or key == signature.TOKEN)'

# The same for the C++ in the processes, which asks the store who is where. SHA-256: FIPS 180-4.
cat >"$source/horovod/common/gloo/signature.h" <<'END'
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>

namespace signature {

// 32 bytes.
inline std::string Sha256(std::string text) {
  static const uint32_t k[64] = {
      0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
      0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
      0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
      0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
      0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
      0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
      0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
      0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
  uint32_t h[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  auto turned = [](uint32_t x, int n) { return x >> n | x << (32 - n); };
  const uint64_t num_bits = text.size() * 8;
  text += '\x80';
  text.resize((text.size() + 71) / 64 * 64 - 8);
  for (int shift = 56; shift >= 0; shift -= 8) text += char(num_bits >> shift);
  for (size_t block = 0; block < text.size(); block += 64) {
    uint32_t w[64], v[8];
    for (int i = 0; i < 64; ++i) {
      if (i < 16) {
        w[i] = 0;
        for (int j = 0; j < 4; ++j) w[i] = w[i] << 8 | uint8_t(text[block + 4 * i + j]);
      } else {
        w[i] = w[i - 16] + w[i - 7] + (turned(w[i - 15], 7) ^ turned(w[i - 15], 18) ^ w[i - 15] >> 3) +
               (turned(w[i - 2], 17) ^ turned(w[i - 2], 19) ^ w[i - 2] >> 10);
      }
    }
    for (int i = 0; i < 8; ++i) v[i] = h[i];
    for (int i = 0; i < 64; ++i) {
      const uint32_t a = v[0], e = v[4];
      const uint32_t first = v[7] + (turned(e, 6) ^ turned(e, 11) ^ turned(e, 25)) + ((e & v[5]) ^ (~e & v[6])) + k[i] + w[i];
      const uint32_t second = (turned(a, 2) ^ turned(a, 13) ^ turned(a, 22)) + ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
      for (int j = 7; j > 0; --j) v[j] = v[j - 1];
      v[4] += first;
      v[0] = first + second;
    }
    for (int i = 0; i < 8; ++i) h[i] += v[i];
  }
  std::string digest;
  for (uint32_t word : h) {
    for (int shift = 24; shift >= 0; shift -= 8) digest += char(word >> shift);
  }
  return digest;
}

inline std::string Hex(const std::string& bytes) {
  std::string text;
  for (uint8_t byte : bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

inline std::string Hmac(std::string key, const std::string& message) {
  if (key.size() > 64) key = Sha256(key);
  key.resize(64);
  std::string inner = key, outer = key;
  for (char& byte : inner) byte ^= 0x36;
  for (char& byte : outer) byte ^= 0x5c;
  return Sha256(outer + Sha256(inner + message));
}

// partial_fc/signature.py says what it means.
inline std::string Header(const std::string& method, const std::string& url, const std::string& body) {
  static std::atomic<uint64_t> number{0};
  static const std::string sender = [] {
    std::random_device random;
    std::string bytes;
    for (int i = 0; i < 16; ++i) bytes += char(random());
    return Hex(bytes);
  }();
  const char* token = std::getenv("_HOROVOD_STORE_TOKEN");
  const std::string text = sender + " " + std::to_string(++number) + " " + Hex(Sha256(body));
  return "Horovod-Store-Signature: " + text + " " + Hex(Hmac(token ? token : "", text + " " + method + " " + url));
}

} // namespace signature
END
file=horovod/common/gloo/http_store
replace $file.h 'PerformHTTP(http::Request& request,' 'PerformHTTP(const std::string& url, http::Request& request,'
replace $file.cc 'HTTPStore::PerformHTTP(http::Request& request,' 'HTTPStore::PerformHTTP(const std::string& url, http::Request& request,'
expect $file.cc '  PerformHTTP(request, HTTP_PUT_METHOD'
sed -i 's/PerformHTTP(request,/PerformHTTP(url, request,/' "$source/$file.cc"
replace $file.cc '#include "gloo_context.h"' '#include "gloo_context.h"'$'\n''#include "signature.h"'
replace $file.cc 'request.send(method, body);' 'request.send(method, body, {signature::Header(method, url, body)});'

# Where the hosts' common network is looked for (several hosts, no --network-interfaces), the key of the servers that do
# it was on command lines. What it opens is unpickled, too.
file=$runner/driver/driver_service.py
replace $file "'{driver_addresses} {settings}' " "'{driver_addresses}' "
replace $file 'driver_addresses=codec.dumps_base64(driver_addresses),
                    settings=codec.dumps_base64(settings))' 'driver_addresses=codec.dumps_base64(driver_addresses))'
replace $file 'exit_code = safe_shell_exec.execute(command,' \
    "env = {**os.environ, '_HOROVOD_SETTINGS': codec.dumps_base64(settings)}
            exit_code = safe_shell_exec.execute('printf \"%s\\\\n\" \"\$_HOROVOD_SETTINGS\" | ' + command, env=env,"
file=$runner/task_fn.py
replace $file 'len(sys.argv) != 5' 'len(sys.argv) != 4'
replace $file '<driver_addresses> <settings>' '<driver_addresses>'
replace $file 'codec.loads_base64(sys.argv[4])' 'codec.loads_base64(sys.stdin.readline())'

# Asked to end (SIGTERM, Ctrl-C), horovodrun gave its processes 5 s, and so they had when it was killed itself: a larger
# checkpoint was lost. Now they have ten minutes; a second signal, more than a second later, ends them at once. Where
# another process has failed it is 5 s as before. The shell between horovodrun and a process becomes that process (exec),
# so that this knows when what led it is gone.
file=$runner/common/util/safe_shell_exec.py
replace $file 'GRACEFUL_TERMINATION_TIME_S = 5' "$(cat <<'END'
GRACEFUL_TERMINATION_TIME_S = 5
CHECKPOINT_TIME_S = 600


def _runs(p):
    # Looks only: who waits for the process needs its status.
    try:
        return p.is_running() and p.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
END
)"
replace $file 'def terminate_executor_shell_and_children(pid):' \
    'def terminate_executor_shell_and_children(pid, time_s=GRACEFUL_TERMINATION_TIME_S):'
replace $file '    # Terminate children gracefully.
    for child in p.children():' "$(cat <<'END'
    # Terminate children gracefully; the shell itself where it has become the command, or has none yet.
    try:
        children = (p.children() if p.cmdline()[:2] == ['/bin/sh', '-c'] else []) or [p]
    except psutil.NoSuchProcess:
        return
    for child in children:
END
)"
replace $file '    gone, alive = psutil.wait_procs(p.children(), timeout=GRACEFUL_TERMINATION_TIME_S)' "$(cat <<'END'
    end = time.monotonic() + time_s
    while time.monotonic() < end and any(map(_runs, children)):
        time.sleep(0.1)
    alive = [child for child in children if _runs(child)]
    if not alive:
        return
END
)"
replace $file 'def _exec_middleman(command, env, exit_event,' 'def _exec_middleman(command, env, exit_event, asked_event,'
replace $file 'on_event(exit_event, terminate_executor_shell_and_children, args=(executor_shell.pid,), daemon=True)' "$(cat <<'END'
def end_when_told():
        exit_event.wait()
        time_s = CHECKPOINT_TIME_S if asked_event.is_set() else GRACEFUL_TERMINATION_TIME_S
        terminate_executor_shell_and_children(executor_shell.pid, time_s)

    in_thread(end_when_told)
END
)"
replace $file $'os.read(r.fileno(), 1)\n        terminate_executor_shell_and_children(executor_shell.pid)' "$(cat <<'END'
os.read(r.fileno(), 1)
        # It was told before: whoever kills horovodrun now does not want to wait.
        time_s = 0 if exit_event.is_set() else CHECKPOINT_TIME_S
        terminate_executor_shell_and_children(executor_shell.pid, time_s)
END
)"
replace $file '    exit_event = _create_event(ctx)' "$(cat <<'END'
    exit_event = _create_event(ctx)
    # Set before it where somebody has asked for the end, and nothing has failed.
    asked_event = _create_event(ctx)
END
)"
replace $file 'args=(command, env, exit_event,' 'args=(command, env, exit_event, asked_event,'
replace $file '        on_event(event, exit_event.set, stop=stop, silent=True)' "$(cat <<'END'
        def end(asked=getattr(event, 'by_signal', False)):
            if asked:
                asked_event.set()
            exit_event.set()

        on_event(event, end, stop=stop, silent=True)
END
)"
replace $file '        # interrupted, send middleman TERM signal which will terminate children' "$(cat <<'END'
        # interrupted, send middleman TERM signal which will terminate children
        asked_event.set()
END
)"
file=$runner/gloo_run.py
replace $file '    event = threading.Event()

    def set_event_on_signal(signum, frame):
        event.set()
' "$(cat <<'END'
    event = threading.Event()
    event.by_signal = True
    first = []

    def set_event_on_signal(signum, frame):
        first.append(time.monotonic())
        if first[-1] > first[0] + 1:
            os._exit(128 + signum)
        event.set()
END
)"$'\n'
replace $file "shell='env'," "shell='exec env',"

# Over MPI horovodrun becomes a shell that waits for mpirun: whoever ended it left mpirun and the training running. Now it
# is as with run.sh: the shell tells mpirun (Open MPI's), by SIGUSR1, which that passes on; after SIGTERM it would kill its
# processes a second later. Where the shell is killed, the kernel tells it.
replace $runner/mpi_run.py "        os.execve('/bin/sh', ['/bin/sh', '-c', mpirun_command], env)" "$(cat <<'END'
        mpirun_command = 'exec ' + mpirun_command if impi_or_mpich else _LED.replace('MPIRUN', mpirun_command)
        os.execve('/bin/sh', ['/bin/sh', '-c', mpirun_command], env)
END
)"
replace $runner/mpi_run.py 'def mpi_run(settings, nics, env, command, stdout=None, stderr=None):' "$(cat <<'END'
# What comes within a second, as from timeout(1), which sends two, is one signal. mpirun has a session of its own: Ctrl-C
# in a terminal reaches the shell alone.
_LED = """
asked= interrupted=
ask() {
    now=$(date +%s)
    if [ -z "$asked" ]; then
        asked=$now
        kill -USR1 "$job"
    elif [ "$now" -gt $((asked + 1)) ]; then
        kill -"$1" "$job"
    fi
}
trap 'ask TERM' TERM
trap 'ask USR1' USR1 HUP
trap 'interrupted=1; ask INT' INT
lead=
if command -v setsid >/dev/null && command -v setpriv >/dev/null; then lead='setsid setpriv --pdeathsig USR1'; fi
# Else two that start at once remove each other's /tmp/ompi.HOST.USER, which they find empty; the environment reaches all hosts.
if [ -z "$TMPDIR$OMPI_MCA_orte_tmpdir_base$OMPI_MCA_orte_top_session_dir" ]; then
    export OMPI_MCA_orte_top_session_dir="$(mktemp -u /tmp/ompi.run.XXXXXXXX)"
fi
$lead MPIRUN &
job=$!
while :; do
    wait "$job"
    status=$?
    kill -0 "$job" 2>/dev/null || break
done
[ -z "$interrupted" ] || exit 130
exit "$status"
"""


def mpi_run(settings, nics, env, command, stdout=None, stderr=None):
END
)"
# horovodrun had ssh take whatever key a host shows, also another one than before. It never asks now, and ~/.ssh decides.
replace $runner/util/remote.py 'ssh -o PasswordAuthentication=no -o StrictHostKeyChecking=no' 'ssh -o BatchMode=yes'

# horovodrun's elastic driver tells rank 0 of hosts that come and go, and forms no new world meanwhile. Its connect had no
# limit: with that host's cable cut, the others stood still for 82 s (docs/log.md, 2026-11-22).
network=horovod/runner/common/util/network.py
sed -i '/def _send_one/,/return resp/ s/^\( *\)sock\.connect(addr)$/\1sock.settimeout(2)\n&\n\1sock.settimeout(None)/' "$source/$network"
expect $network 'sock.settimeout(2)'

# A process that ended while the driver waited in vain for hosts was told of after the driver's end: that waited at a
# barrier for the others, who had left it, and horovodrun for ever.
replace horovod/runner/elastic/registration.py '        self._action_event.wait()' "$(cat <<'END'
        self._action_event.wait()
        if self._driver.finished():
            return self._rendezvous_id
END
)"

# A host that is taken off the list (a process of it has failed) has its others ended. Where it was back after its cooldown,
# and no world had been formed without it, the driver took them for running, started none, and waited for ever.
file=horovod/runner/elastic/driver.py
replace $file '        active_slots = set([(host, slot_info.local_rank)
                            for host, slots in self._host_assignments.items()' "$(cat <<'END'
        running = {host: slots for host, slots in self._host_assignments.items()
                   if not self._host_manager.has_been_ended(host)}
        active_slots = set([(host, slot_info.local_rank)
                            for host, slots in running.items()
END
)"
replace $file 'prev_hosts = self._host_assignments.keys()' 'prev_hosts = running.keys()'
replace horovod/runner/elastic/discovery.py '    def get_host_event(self, host):' "$(cat <<'END'
    def has_been_ended(self, host):
        # Since processes were started on it: those get an event of their own.
        return self._hosts_state[host]._event.is_set()

    def get_host_event(self, host):
END
)"

# Horovod and Gloo leave out headers that older standard libraries included by themselves (before GCC 13 and 14).
# Make's own MAKEFLAGS, where make called this, would set the number of jobs to one; so would nproc under OMP_NUM_THREADS.
env HOROVOD_WITH_PYTORCH=1 HOROVOD_${mxnet}_MXNET=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 \
    PYTHONPATH="$root" CXXFLAGS="${CXXFLAGS:-} -include cstdint -include stdexcept -include string" \
    MAKEFLAGS="-j$(env -u OMP_NUM_THREADS nproc)" \
    "$python" -m pip wheel --quiet --no-deps --no-build-isolation -w "$work/wheels" "$source" >"$work/log" 2>&1 ||
    { cat "$work/log" >&2; exit 1; }
mkdir -p "$wheels"
mv "$work"/wheels/*.whl "$wheels" # complete or not there at all: a stopped build leaves no half wheel in the cache
