/* A libnvidia-ml.so.1 with the GPUs that FAKE_GPUS names: "80000:75800:4242:87" is total MB, used MB, pid,
   percent busy (0 when left out), and ";" goes to the next GPU. The memory of a process that is gone is free, all but
   100 MB. FAKE_GPUS_ERROR makes every call after the start fail. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned int gpu, memory; } Utilization;
typedef struct {
    unsigned int pid; unsigned long long used; unsigned int gpu_instance, compute_instance;
} Process;
typedef struct { unsigned long long total, used; unsigned int pid, busy; } Gpu;

/* 4242 is nobody's: it stands for a process that is always there */
static int is_gone(unsigned int pid) {
    char path[64], line[512], *state;
    FILE *file;
    if (!pid || pid == 4242) return 0;
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    file = fopen(path, "r");
    if (!file) return 1;
    state = fgets(line, sizeof line, file) ? strrchr(line, ')') : NULL;
    fclose(file);
    return !state || state[2] == 'Z';
}
static int read_gpus(Gpu *gpus) {
    const char *text = getenv("FAKE_GPUS");
    int count = 0;
    while (text && *text && count < 16) {
        gpus[count].pid = gpus[count].busy = 0;
        sscanf(text, "%llu:%llu:%u:%u", &gpus[count].total, &gpus[count].used, &gpus[count].pid,
               &gpus[count].busy);
        if (is_gone(gpus[count].pid)) { gpus[count].used = 100; gpus[count].pid = gpus[count].busy = 0; }
        count++;
        text = strchr(text, ';');
        if (text) text++;
    }
    return count;
}
static Gpu one(void *device) { Gpu gpus[16]; read_gpus(gpus); return gpus[(size_t)device - 1]; }
static int failing(void) { return getenv("FAKE_GPUS_ERROR") ? 15 : 0; } /* GPU is lost */

int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned int flags) { (void)flags; return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { (void)code; return "GPU is lost"; }
int nvmlDeviceGetCount_v2(unsigned int *count) { Gpu g[16]; *count = read_gpus(g); return failing(); }
int nvmlDeviceGetHandleByIndex_v2(unsigned int i, void **d) { *d = (void *)(size_t)(i + 1); return failing(); }
int nvmlDeviceGetName(void *d, char *name, unsigned int n) { (void)d; snprintf(name, n, "fake H100"); return 0; }
int nvmlDeviceGetMemoryInfo(void *d, Memory *m) {
    Gpu g = one(d);
    m->total = g.total * 1000000; m->used = g.used * 1000000; m->free = m->total - m->used;
    return 0;
}
int nvmlDeviceGetUtilizationRates(void *d, Utilization *u) { u->gpu = one(d).busy; u->memory = 0; return failing(); }
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned int *count, Process *list) {
    Gpu g = one(d);
    unsigned int found = g.pid ? 1 : 0, room = *count;
    *count = found;
    if (found > room) return 7; /* insufficient size */
    if (found) { list[0].pid = g.pid; list[0].used = g.used * 1000000; }
    return 0;
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *d, unsigned int *count, Process *list) {
    (void)d; (void)list; *count = 0; return 0;
}
