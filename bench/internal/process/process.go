// Package process runs the programs that are measured, each on its core. Linux
// only.
package process

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// AnyCPU leaves it to the kernel where a process runs.
const AnyCPU = -1

// PinThread makes the calling thread, and those that it starts, run on one core.
func PinThread(cpu int) (restore func(), err error) {
	if cpu == AnyCPU {
		return func() {}, nil
	}
	var before, only unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		return nil, fmt.Errorf("asking for the thread's cores: %w", err)
	}
	only.Set(cpu)
	if err := unix.SchedSetaffinity(0, &only); err != nil {
		return nil, fmt.Errorf("pinning to core %d: %w", cpu, err)
	}
	return func() { _ = unix.SchedSetaffinity(0, &before) }, nil
}

// WorkDirectory makes a directory for the files of a run. remove removes it, and
// so does an interrupt, which ends this process.
func WorkDirectory(pattern string) (directory string, remove func(), err error) {
	if directory, err = os.MkdirTemp("", pattern); err != nil {
		return "", nil, fmt.Errorf("making a directory: %w", err)
	}
	interrupts := make(chan os.Signal, 1)
	signal.Notify(interrupts, os.Interrupt, syscall.SIGTERM)
	go func() {
		<-interrupts
		_ = os.RemoveAll(directory)
		os.Exit(130)
	}()
	return directory, func() { _ = os.RemoveAll(directory) }, nil
}

// Start starts the process from a thread that runs on one core: the process
// inherits that, and ends with us. What it ended with can be received.
func Start(command *exec.Cmd, cpu int) (ended <-chan error, err error) {
	command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	exit := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine's other children
		restore, err := PinThread(cpu)
		if err != nil {
			started <- err
			return
		}
		err = command.Start()
		restore()
		started <- err
		if err == nil {
			exit <- command.Wait() // Pdeathsig is about the thread that started it
		}
	}()
	return exit, <-started
}

// Stop ends a process that was started.
func Stop(command *exec.Cmd) {
	_ = command.Process.Signal(syscall.SIGTERM)
	for range 100 {
		if command.Process.Signal(syscall.Signal(0)) != nil {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	_ = command.Process.Kill()
}

// AwaitListening waits until something listens on the address.
func AwaitListening(address netip.AddrPort) error {
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		conn, err := net.Dial("tcp", address.String())
		if err == nil {
			return conn.Close()
		}
		if time.Now().After(deadline) {
			return err
		}
	}
}

// FreeAddress is one on the loopback interface that nothing listens on.
func FreeAddress() (netip.AddrPort, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("looking for a free port: %w", err)
	}
	defer listener.Close()
	return netip.MustParseAddrPort(listener.Addr().String()), nil
}

// Usage is what a process has used up to now.
type Usage struct {
	CPU time.Duration // user and system
	RSS int64         // bytes, at this moment
}

const ticksPerSecond = 100 // USER_HZ, the same on all Linux platforms that Go knows

// UsageOf reads what a process has used.
func UsageOf(command *exec.Cmd) (u Usage, err error) {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(command.Process.Pid) + "/stat")
	if err != nil {
		return u, fmt.Errorf("reading a process's CPU time: %w", err)
	}
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+2:]))
	user, _ := strconv.Atoi(fields[11])
	system, _ := strconv.Atoi(fields[12])
	pages, _ := strconv.ParseInt(fields[21], 10, 64)
	return Usage{
		CPU: time.Duration(user+system) * time.Second / ticksPerSecond,
		RSS: pages * int64(os.Getpagesize()),
	}, nil
}

// DescribeMachine prints what the measurements are made on.
func DescribeMachine() {
	info, _ := os.ReadFile("/proc/cpuinfo")
	model := regexp.MustCompile(`model name\s*: (.*)`).FindSubmatch(info)
	loads, _ := os.ReadFile("/proc/loadavg")
	if model != nil {
		fmt.Printf("%s, %d cores, ", model[1], runtime.NumCPU())
	}
	fmt.Printf("%s, load average %s\n", runtime.Version(), strings.Join(strings.Fields(string(loads))[:3], " "))
}
