// A parallel region that does not wait for threads that have not begun to work in it.
#pragma once

// Call work(context) in this thread and in up to `threads` - 1 helpers. Return when this thread's call and all calls that began have
// ended; a helper that the system has not scheduled by then takes no part, so busy processors do not delay the region. The work must
// be complete when any one call returns: calls take it from work queues. Do not call this from within `work`.
__attribute__((visibility("hidden"))) void sp_run_together(int threads, void (*work)(void *), void *context);
