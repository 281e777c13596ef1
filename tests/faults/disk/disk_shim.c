/* Stands between a process and its disk (LD_PRELOAD): what is asked of the files below one folder is counted by rank,
   written into a log, and, where a test says so, fails or ends the process. Threads of no rank, and all other files, are
   left alone, but for descriptors 1 and 2: where DISK_SHIM_OUTPUT_ERROR has an error's number, all that Python writes
   to them fails with it.

   Nothing at all is ever synced: what a sync promises is the business of crash_states.py. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_RANKS 4
#define MAX_FILES 1024
#define PATH_BYTES 512
#define LOG_BYTES (64u << 20)

enum { NOTHING, CRASH, FAIL, SHORT };          /* what is to happen */
enum { ONCE, FROM_THERE_ON, FROM_THERE_ON_ALL }; /* _ALL: to all ranks, as on a disk that they share */
enum { CRASHED = 77 };                         /* exit status */

/* As operations.py reads it. The paths (without the folder) and the data follow, padded to 8 bytes. */
struct record {
    uint32_t bytes;
    int16_t kind, rank;
    int32_t result; /* or minus the error's number */
    int32_t file;   /* of an open file: its number among all that were ever opened; flags of open: `flags` */
    int64_t offset; /* of pwrite; -1: where the file stands; of truncate: the size */
    int32_t flags;
    uint32_t path_bytes, other_bytes, data_bytes;
};

/* Shared with the processes that are forked. */
struct control {
    char below[PATH_BYTES];
    size_t below_bytes;
    int what, error, how_long, rank, at, broken, struck;
    char struck_path[PATH_BYTES];
    int count[MAX_RANKS];
    int num_files;
    size_t log_bytes;
    char log[LOG_BYTES];
};

static struct control *control;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static __thread int my_rank = -1;

static struct open_file {
    int number; /* 0: none of ours */
    int written;
    char path[PATH_BYTES];
} files[MAX_FILES];

#define NEXT(name)                                                                                                     \
    static __typeof__(&name) next;                                                                                     \
    if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* ---- for the tests */

/* "": nothing is watched. Returns the log's beginning. */
const char *disk_watch(const char *below) {
    if (!control) {
        control = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (control == MAP_FAILED) return NULL;
    }
    snprintf(control->below, PATH_BYTES, "%s", below);
    control->below_bytes = strlen(below);
    return control->log;
}

void disk_rank(int rank) { my_rank = rank; }

/* Counts and log begin anew; what: see above, to rank's operation number `at`, from 0. */
void disk_begin(int what, int error, int how_long, int rank, int at) {
    control->what = what, control->error = error, control->how_long = how_long, control->rank = rank, control->at = at;
    control->broken = control->struck = 0, control->log_bytes = 0;
    memset(control->count, 0, sizeof control->count);
}

/* The disk is well again; the log goes on. */
void disk_heal(void) { control->what = NOTHING; }
int disk_struck(void) { return control->struck; }
const char *disk_struck_path(void) { return control->struck_path; }
int disk_count(int rank) { return control->count[rank]; }
size_t disk_log_bytes(void) { return control->log_bytes; }

static void record(int kind, long result, int file, int64_t offset, int flags, const char *path, const char *other,
                   const void *data, size_t data_bytes) {
    struct record r = {.kind = (int16_t)kind, .rank = (int16_t)my_rank, .file = file, .offset = offset, .flags = flags};
    r.result = result < 0 ? -errno : (int)result;
    r.path_bytes = path ? strlen(path) : 0, r.other_bytes = other ? strlen(other) : 0, r.data_bytes = data_bytes;
    size_t bytes = sizeof r + r.path_bytes + r.other_bytes + data_bytes;
    bytes = (bytes + 7) & ~(size_t)7;
    if (control->log_bytes + bytes > LOG_BYTES) {
        dprintf(2, "disk_shim: the log is full\n");
        _exit(1);
    }
    r.bytes = (uint32_t)bytes;
    char *to = control->log + control->log_bytes;
    memcpy(to, &r, sizeof r), to += sizeof r;
    memcpy(to, path, r.path_bytes), to += r.path_bytes;
    memcpy(to, other, r.other_bytes), to += r.other_bytes;
    memcpy(to, data, data_bytes);
    control->log_bytes += bytes;
}

/* A line of the test's own in the log: a meeting of the ranks, a promise. */
void disk_note(int kind, int value) {
    pthread_mutex_lock(&mutex);
    record(kind, value, 0, 0, 0, NULL, NULL, NULL, 0);
    pthread_mutex_unlock(&mutex);
}

/* ---- what is ours, and what happens to it */

/* The path below the folder, or NULL; of a folder's descriptor and a name in `buffer`. */
static const char *ours(int folder, const char *path, char *buffer) {
    if (!control || my_rank < 0 || !control->below_bytes || !path) return NULL;
    if (path[0] != '/' && folder >= 0 && folder < MAX_FILES && files[folder].number) {
        snprintf(buffer, PATH_BYTES, "%s/%s", files[folder].path, path);
        return buffer;
    }
    if (strncmp(path, control->below, control->below_bytes)) return NULL;
    path += control->below_bytes;
    if (*path != '/' && *path) return NULL;
    snprintf(buffer, PATH_BYTES, "%s", *path ? path + 1 : path);
    return buffer;
}

static struct open_file *file_of(int fd) {
    return control && my_rank >= 0 && fd >= 0 && fd < MAX_FILES && files[fd].number ? &files[fd] : NULL;
}

/* Whether the operation is to fail (then errno is set); the process may end here. Called with the mutex held. */
static int struck(int is_write, const char *path) {
    int now = control->count[my_rank]++, what = control->what;
    if (what == NOTHING) return 0;
    int hit = control->rank == my_rank && now == control->at;
    if (control->broken) hit = control->how_long == FROM_THERE_ON_ALL || control->rank == my_rank;
    if (!hit || (what == SHORT && !is_write)) return 0;
    if (what == CRASH) _exit(CRASHED);
    if (!control->struck++) snprintf(control->struck_path, PATH_BYTES, "%s", path);
    control->broken = control->how_long != ONCE;
    errno = control->error;
    return what;
}

/* An operation on names: CALL, unless it fails first. */
#define ON_NAMES(kind, result, path, other, flags, call)                                                               \
    do {                                                                                                               \
        pthread_mutex_lock(&mutex);                                                                                    \
        result = struck(0, path) ? -1 : (call);                                                                        \
        record(kind, result, 0, 0, flags, path, other, NULL, 0);                                                       \
        pthread_mutex_unlock(&mutex);                                                                                  \
    } while (0)

static int opened(int fd, int flags, const char *path) {
    int number = 0;
    if (fd >= 0 && fd < MAX_FILES) {
        number = files[fd].number = ++control->num_files;
        files[fd].written = 0;
        memmove(files[fd].path, path, strlen(path) + 1);
    }
    record('o', fd, number, 0, flags, path, NULL, NULL, 0);
    return fd;
}

#define OPEN(name, folder, call)                                                                                       \
    char buffer[PATH_BYTES];                                                                                           \
    mode_t mode = 0;                                                                                                   \
    if (flags & (O_CREAT | O_TMPFILE)) {                                                                               \
        va_list more;                                                                                                  \
        va_start(more, flags);                                                                                         \
        mode = va_arg(more, mode_t);                                                                                   \
        va_end(more);                                                                                                  \
    }                                                                                                                  \
    NEXT(name);                                                                                                        \
    const char *below = ours(folder, path, buffer);                                                                    \
    if (!below) {                                                                                                      \
        int fd = call;                                                                                                 \
        if (fd >= 0 && fd < MAX_FILES) files[fd].number = 0;                                                           \
        return fd;                                                                                                     \
    }                                                                                                                  \
    pthread_mutex_lock(&mutex);                                                                                        \
    int fd = opened(struck(0, below) ? -1 : (call), flags, below);                                                     \
    pthread_mutex_unlock(&mutex);                                                                                      \
    return fd

int open(const char *path, int flags, ...) { OPEN(open, AT_FDCWD, next(path, flags, mode)); }
int open64(const char *path, int flags, ...) { OPEN(open64, AT_FDCWD, next(path, flags, mode)); }
int openat(int folder, const char *path, int flags, ...) { OPEN(openat, folder, next(folder, path, flags, mode)); }
int openat64(int folder, const char *path, int flags, ...) { OPEN(openat64, folder, next(folder, path, flags, mode)); }

int close(int fd) {
    NEXT(close);
    struct open_file *file = file_of(fd);
    if (!file) {
        if (fd >= 0 && fd < MAX_FILES) files[fd].number = 0;
        return next(fd);
    }
    pthread_mutex_lock(&mutex);
    /* Only what was written can be lost by then (a network's disk); the descriptor is gone all the same. */
    int fails = file->written && struck(0, file->path), error = errno;
    int result = next(fd);
    if (fails) result = -1, errno = error;
    if (file->written) record('c', result, file->number, 0, 0, file->path, NULL, NULL, 0);
    file->number = 0;
    pthread_mutex_unlock(&mutex);
    return result;
}

/* ---- contents */

static ssize_t written(struct open_file *file, const void *data, size_t bytes, int64_t offset,
                       ssize_t (*put)(int, const void *, size_t, int64_t), int fd) {
    pthread_mutex_lock(&mutex);
    int what = bytes ? struck(1, file->path) : 0;
    ssize_t result = what == FAIL ? -1 : put(fd, data, what == SHORT ? (bytes + 7) / 8 : bytes, offset);
    file->written = 1;
    record('w', result, file->number, offset, 0, file->path, NULL, data, result > 0 ? (size_t)result : 0);
    pthread_mutex_unlock(&mutex);
    return result;
}

static ssize_t put_write(int fd, const void *data, size_t bytes, int64_t offset) {
    NEXT(write);
    (void)offset;
    return next(fd, data, bytes);
}

static ssize_t put_pwrite(int fd, const void *data, size_t bytes, int64_t offset) {
    NEXT(pwrite64);
    return next(fd, data, bytes, offset);
}

static int output_error;

__attribute__((constructor)) static void read_output_error(void) {
    const char *number = getenv("DISK_SHIM_OUTPUT_ERROR");
    int is_python = strncmp(program_invocation_short_name, "python", 6) == 0; /* shells have pipes of their own there */
    output_error = number && is_python ? atoi(number) : 0;
}

ssize_t write(int fd, const void *data, size_t bytes) {
    if (output_error && (fd == 1 || fd == 2)) {
        errno = output_error;
        return -1;
    }
    struct open_file *file = file_of(fd);
    return file ? written(file, data, bytes, -1, put_write, fd) : put_write(fd, data, bytes, -1);
}

ssize_t pwrite64(int fd, const void *data, size_t bytes, off64_t offset) {
    struct open_file *file = file_of(fd);
    return file ? written(file, data, bytes, offset, put_pwrite, fd) : put_pwrite(fd, data, bytes, offset);
}

ssize_t pwrite(int fd, const void *data, size_t bytes, off_t offset) { return pwrite64(fd, data, bytes, offset); }

ssize_t read(int fd, void *data, size_t bytes) {
    NEXT(read);
    struct open_file *file = file_of(fd);
    if (!file) return next(fd, data, bytes);
    pthread_mutex_lock(&mutex);
    ssize_t result = struck(0, file->path) ? -1 : next(fd, data, bytes);
    record('R', result, file->number, 0, 0, file->path, NULL, NULL, 0);
    pthread_mutex_unlock(&mutex);
    return result;
}

#define ON_FILE(kind, call, instead, where)                                                                            \
    NEXT(call);                                                                                                        \
    struct open_file *file = file_of(fd);                                                                              \
    if (!file) return kind == 's' && control ? 0 : next instead;                                                       \
    pthread_mutex_lock(&mutex);                                                                                        \
    int result = struck(0, file->path) ? -1 : kind == 's' ? 0 : next instead;                                          \
    file->written |= kind == 't';                                                                                      \
    record(kind, result, file->number, where, 0, file->path, NULL, NULL, 0);                                           \
    pthread_mutex_unlock(&mutex);                                                                                      \
    return result

int fsync(int fd) { ON_FILE('s', fsync, (fd), 0); }
int fdatasync(int fd) { ON_FILE('s', fdatasync, (fd), 0); }
int ftruncate64(int fd, off64_t size) { ON_FILE('t', ftruncate64, (fd, size), size); }
int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }
int flock(int fd, int operation) { ON_FILE('f', flock, (fd, operation), 0); }

/* A mapping that may be written through: none of the operations here sees what is. The tests want none. */
void *mmap64(void *at, size_t bytes, int protection, int flags, int fd, off64_t offset) {
    NEXT(mmap64);
    struct open_file *file = file_of(fd);
    if (file && (protection & PROT_WRITE) && (flags & MAP_SHARED)) disk_note('M', 0);
    return next(at, bytes, protection, flags, fd, offset);
}

/* ---- names */

#define NAMED(kind, name, folder, path, instead)                                                                       \
    char buffer[PATH_BYTES];                                                                                           \
    NEXT(name);                                                                                                        \
    const char *below = ours(folder, path, buffer);                                                                    \
    if (!below) return next instead;                                                                                   \
    int result;                                                                                                        \
    ON_NAMES(kind, result, below, NULL, 0, next instead);                                                              \
    return result

int mkdir(const char *path, mode_t mode) { NAMED('m', mkdir, AT_FDCWD, path, (path, mode)); }
int mkdirat(int folder, const char *path, mode_t mode) { NAMED('m', mkdirat, folder, path, (folder, path, mode)); }
int rmdir(const char *path) { NAMED('d', rmdir, AT_FDCWD, path, (path)); }
int unlink(const char *path) { NAMED('u', unlink, AT_FDCWD, path, (path)); }
int unlinkat(int folder, const char *path, int flags) {
    NAMED(flags & AT_REMOVEDIR ? 'd' : 'u', unlinkat, folder, path, (folder, path, flags));
}

#define NAMED_TWICE(kind, name, instead)                                                                               \
    char buffer[PATH_BYTES], buffer2[PATH_BYTES];                                                                      \
    NEXT(name);                                                                                                        \
    const char *below = ours(from_folder, from, buffer), *other = ours(to_folder, to, buffer2);                        \
    if (!below || !other) return next instead;                                                                         \
    int result;                                                                                                        \
    ON_NAMES(kind, result, below, other, 0, next instead);                                                             \
    return result

int renameat(int from_folder, const char *from, int to_folder, const char *to) {
    NAMED_TWICE('r', renameat, (from_folder, from, to_folder, to));
}
int linkat(int from_folder, const char *from, int to_folder, const char *to, int flags) {
    NAMED_TWICE('l', linkat, (from_folder, from, to_folder, to, flags));
}
int rename(const char *from, const char *to) { return renameat(AT_FDCWD, from, AT_FDCWD, to); }
int link(const char *from, const char *to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }

/* Looking at a file, or into a folder. */
int stat64(const char *path, struct stat64 *to) { NAMED('L', stat64, AT_FDCWD, path, (path, to)); }
int lstat64(const char *path, struct stat64 *to) { NAMED('L', lstat64, AT_FDCWD, path, (path, to)); }
int stat(const char *path, struct stat *to) { NAMED('L', stat, AT_FDCWD, path, (path, to)); }
int lstat(const char *path, struct stat *to) { NAMED('L', lstat, AT_FDCWD, path, (path, to)); }
int fstatat64(int folder, const char *path, struct stat64 *to, int flags) {
    NAMED('L', fstatat64, folder, path, (folder, path, to, flags));
}

DIR *opendir(const char *path) {
    char buffer[PATH_BYTES];
    NEXT(opendir);
    const char *below = ours(AT_FDCWD, path, buffer);
    if (!below) return next(path);
    pthread_mutex_lock(&mutex);
    DIR *result = struck(0, below) ? NULL : next(path);
    record('D', result ? 0 : -1, 0, 0, 0, below, NULL, NULL, 0);
    pthread_mutex_unlock(&mutex);
    return result;
}
