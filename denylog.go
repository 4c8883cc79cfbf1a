package edgelimit

import (
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/edgelimit/caddy-edgelimit/internal/table"
)

// An attack must not become a flood of log lines. So there is one line when a
// key enters the limited state, as long as few do, and for all else a summary.
// Keys stand in the log only as keyed hashes.

const (
	summaryInterval = time.Second      // under flood
	quietInterval   = time.Minute      // otherwise
	floodDenials    = 10               // denials in a summaryInterval that make a flood
	maxEntryLines   = 3                // lines about keys a second, of all limits together
	rememberLimited = 10_000           // keys that are known to be limited already
	limitedForLeast = 10 * time.Second // without a denial for so long, a key enters anew
)

// denialLog writes about the denials under one name. The zero value is ready to
// use. It is safe for concurrent use.
type denialLog struct {
	mu        sync.Mutex
	limited   *table.Table // keys that a line or a summary told of
	denied    int          // since the last summary
	wouldDeny int          // the same, of what is only observed
	entered   int          // of these, keys that entered the limited state
	summary   int64        // when the last summary was written
	scheduled bool         // a summary of what no flood carries along
	writing   bool         // a line is on its way: who logs to may take long
}

// entryLines bounds the lines about single keys in this process: the second in
// the upper bits, the lines in it in the lower ones.
var entryLines atomic.Int64

func allowEntryLine(now int64) bool {
	second := now / int64(time.Second) << 8
	for {
		before := entryLines.Load()
		lines := before & 0xff
		if before>>8<<8 != second {
			lines = 0
		}
		if lines >= maxEntryLines {
			return false
		}
		if entryLines.CompareAndSwap(before, second|lines+1) {
			return true
		}
	}
}

// note tells of a denial, or of what would be one. While a line is being written
// others only count: a log that takes nothing may hold up one request, not all
// that are denied.
func (l *denialLog) note(logger *zap.Logger, d denial, key uint64, now int64, observed bool) {
	l.mu.Lock()
	write := l.count(logger, d, key, now, observed)
	l.writing = l.writing || write != nil
	l.mu.Unlock()
	l.written(write)
}

// written writes a line that count or summarize returned.
func (l *denialLog) written(write func()) {
	if write == nil {
		return
	}
	write()
	l.mu.Lock()
	l.writing = false
	l.mu.Unlock()
}

// count notes a denial, and returns what is to be written outside the lock, if
// anything is.
func (l *denialLog) count(logger *zap.Logger, d denial, key uint64, now int64, observed bool) (write func()) {
	if l.limited == nil {
		l.limited = table.New(rememberLimited)
	}
	enters := l.limited.Set(key, now, now+int64(max(d.wait, limitedForLeast))) <= now
	if enters && !l.writing && allowEntryLine(now) {
		return func() { logEntry(logger, d, key, observed) }
	}
	if observed {
		l.wouldDeny++
	} else {
		l.denied++
	}
	if enters {
		l.entered++
	}
	if !l.scheduled {
		l.scheduled = true
		time.AfterFunc(quietInterval, func() {
			l.mu.Lock()
			l.scheduled = false
			write := l.summarize(logger, d.name, clock())
			l.writing = l.writing || write != nil
			l.mu.Unlock()
			l.written(write)
		})
	}
	if l.denied+l.wouldDeny >= floodDenials && now-l.summary >= int64(summaryInterval) {
		return l.summarize(logger, d.name, now)
	}
	return nil
}

func logEntry(logger *zap.Logger, d denial, key uint64, observed bool) {
	fields := []zap.Field{zap.String("name", d.name)}
	if key != 0 {
		fields = append(fields, zap.String("key", hashText(key)))
	}
	if d.wait > 0 {
		fields = append(fields, zap.Duration("wait", d.wait))
	}
	message := "a request is denied, and more may be"
	if observed {
		message = "a request would be denied, and more may be"
	}
	logger.Info(message, fields...)
}

// summarize returns what tells of the denials since the last summary, if there
// were any.
func (l *denialLog) summarize(logger *zap.Logger, name string, now int64) (write func()) {
	if l.writing || l.denied+l.wouldDeny == 0 {
		return nil
	}
	fields := []zap.Field{
		zap.String("name", name),
		zap.Int("denied", l.denied), zap.Int("would_deny", l.wouldDeny), zap.Int("keys_newly_limited", l.entered),
	}
	l.denied, l.wouldDeny, l.entered, l.summary = 0, 0, 0, now
	return func() { logger.Info("denials in sum", fields...) }
}

// hashText is how a key appears in logs and in the admin API.
func hashText(key uint64) string {
	text := strconv.FormatUint(key, 16)
	return "0000000000000000"[len(text):] + text
}
