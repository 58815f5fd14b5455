/* Loaded before libc: the n-th open, write, fsync or rename below one folder fails. See test_nth_failure.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

enum { OPEN, WRITE, FSYNC, RENAME, KINDS };
static char folder[4096];
static long calls[KINDS], fail_at;
static int armed, failing_kind, failing_errno, failing_on;
static char ours[65536];

void arm(const char *path, int kind, long n, int error, int on) {
    strncpy(folder, path, sizeof folder - 1);
    memset(calls, 0, sizeof calls);
    failing_kind = kind; fail_at = n; failing_errno = error; failing_on = on; armed = 1;
}
void disarm(void) { armed = 0; }
long counted(int kind) { return calls[kind]; }

static int below(const char *path) { return armed && path && strncmp(path, folder, strlen(folder)) == 0; }
static int known(int fd) { return armed && fd >= 0 && fd < (int)sizeof ours && ours[fd]; }
static int fails(int kind) {
    long n = ++calls[kind];
    if (kind != failing_kind || fail_at == 0 || n < fail_at || (n > fail_at && !failing_on)) return 0;
    errno = failing_errno;
    return 1;
}
#define REAL(name) __typeof__(name) *real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
#define OPENS(name)                                                             \
    int name(const char *path, int flags, ...) {                                \
        REAL(name);                                                             \
        va_list list; va_start(list, flags); int mode = va_arg(list, int); va_end(list); \
        if (below(path) && fails(OPEN)) return -1;                              \
        int fd = real(path, flags, mode);                                       \
        if (fd >= 0 && fd < (int)sizeof ours) ours[fd] = below(path);           \
        return fd;                                                              \
    }
OPENS(open)
OPENS(open64)
ssize_t write(int fd, const void *data, size_t size) { REAL(write); return known(fd) && fails(WRITE) ? -1 : real(fd, data, size); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    REAL(pwrite); return known(fd) && fails(WRITE) ? -1 : real(fd, data, size, at);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    REAL(pwrite64); return known(fd) && fails(WRITE) ? -1 : real(fd, data, size, at);
}
int ftruncate(int fd, off_t size) { REAL(ftruncate); return known(fd) && fails(WRITE) ? -1 : real(fd, size); }
int ftruncate64(int fd, off64_t size) { REAL(ftruncate64); return known(fd) && fails(WRITE) ? -1 : real(fd, size); }
int fsync(int fd) { REAL(fsync); return known(fd) && fails(FSYNC) ? -1 : real(fd); }
int fdatasync(int fd) { REAL(fdatasync); return known(fd) && fails(FSYNC) ? -1 : real(fd); }
int rename(const char *from, const char *to) { REAL(rename); return below(to) && fails(RENAME) ? -1 : real(from, to); }
int mkdir(const char *path, mode_t mode) {
    int (*real)(const char *, mode_t) = (int (*)(const char *, mode_t))dlsym(RTLD_NEXT, "mkdir");
    return below(path) && fails(OPEN) ? -1 : real(path, mode);
}
int close(int fd) { REAL(close); if (fd >= 0 && fd < (int)sizeof ours) ours[fd] = 0; return real(fd); }
