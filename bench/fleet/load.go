package main

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"github.com/edgelimit/caddy-edgelimit/bench/internal/process"
)

// maxClients is how many addresses the script can make.
const maxClients = 1 << 16

// loadScript makes each request one of a client that is drawn at random: clients
// of the real world are not in step.
const loadScript = `
local requests = {}
function init(args)
	math.randomseed(tonumber(args[2]))
	for i = 0, tonumber(args[1]) - 1 do
		local client = string.format('11.0.%d.%d', math.floor(i / 256), i % 256)
		requests[#requests + 1] = wrk.format('GET', '/', {['X-Forwarded-For'] = client})
	end
end
function request() return requests[math.random(#requests)] end
function done(summary, latency)
	local e = summary.errors
	io.write(string.format('result %d %d %d %d %.0f\n', summary.requests, summary.duration, e.status,
		e.connect + e.read + e.write + e.timeout, latency:percentile(99)))
end
`

// loadResult is what came of a load.
type loadResult struct {
	requests int
	denied   int
	elapsed  time.Duration
	p99      time.Duration
	cpu      time.Duration // that wrk took
}

// load sends requests for as long as duration, over connections that are kept.
func (b *bench) load(address netip.AddrPort, duration time.Duration) (r loadResult, err error) {
	script := filepath.Join(b.directory, "load.lua")
	if err := os.WriteFile(script, []byte(loadScript), 0o600); err != nil {
		return r, fmt.Errorf("writing wrk's script: %w", err)
	}
	b.loads++
	command := exec.CommandContext(context.Background(), "wrk", "--threads", "1", "--connections", strconv.Itoa(b.connections),
		"--duration", strconv.Itoa(int(duration.Seconds()))+"s", "--timeout", "5s", "--script", script, "http://"+address.String()+"/",
		"--", strconv.Itoa(b.clients), strconv.Itoa(b.loads))
	var output bytes.Buffer
	command.Stdout, command.Stderr = &output, &output
	ended, err := process.Start(command, b.otherCPU)
	if err != nil {
		return r, fmt.Errorf("starting wrk: %w", err)
	}
	if err := <-ended; err != nil {
		return r, fmt.Errorf("wrk: %w\n%s", err, output.Bytes())
	}
	var micros, p99, lost int
	at := bytes.Index(output.Bytes(), []byte("result "))
	if at < 0 {
		return r, fmt.Errorf("wrk gave no result:\n%s", output.Bytes())
	}
	if _, err := fmt.Sscanf(string(output.Bytes()[at:]), "result %d %d %d %d %d", &r.requests, &micros, &r.denied, &lost, &p99); err != nil {
		return r, fmt.Errorf("reading wrk's result: %w\n%s", err, output.Bytes())
	}
	if lost > 0 || r.requests == 0 {
		return r, fmt.Errorf("%d requests, %d errors of connections", r.requests, lost)
	}
	r.elapsed, r.p99 = time.Duration(micros)*time.Microsecond, time.Duration(p99)*time.Microsecond
	r.cpu = command.ProcessState.UserTime() + command.ProcessState.SystemTime()
	return r, nil
}
